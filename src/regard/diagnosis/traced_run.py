"""The operations of one run: what went in, what came out, on which line; and what follows a change.

A run is deterministic, so that an operation is known by its place among all of them: in another run
its output can be replaced, and what moves behind it is seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.subject import Outcome, Subject
from regard.tracing.tracer import Caller, Listener, Operation, Tracer, apart

__all__ = ["Event", "Trace", "recorded", "traced"]

Edit = Callable[[Tensor, tuple[Any, ...]], Tensor]
"""From what an operation gave, and its arguments, to what it is to give."""


@dataclass(frozen=True, eq=False)
class Event:
    """One operation of a run.

    Attributes:
        place: its number among all operations of the run.
        name: such as ``aten._softmax.default``.
        args: its arguments; tensors are copies.
        kwargs: likewise.
        output: its first tensor, a copy; None where it gave none.
        reads: where its tensors lie, by address; the run keeps them all, so that no two share one
            that are not views of each other.
        writes: where the tensors that it gave lie.
        caller: whose it is; None in runs that are not recorded.
    """

    place: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    caller: Caller | None

    @property
    def operator(self) -> str:
        """Its name without library and overload: ``_softmax``."""
        return self.name.split(".")[1]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of what it gave; None where it gave no tensor."""
        return None if self.output is None else self.output.dtype

    @property
    def operands(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor)]


@dataclass(frozen=True, eq=False)
class Trace:
    """A run and its operations.

    Attributes:
        events: those that were recorded, by place.
        outcome: what the run gave back.
        entries: where the inputs lie, by address.
    """

    events: Mapping[int, Event]
    outcome: Outcome
    entries: frozenset[int]

    def __iter__(self) -> Iterator[Event]:
        """The events in order."""
        return iter(self.events.values())

    @property
    def moved(self) -> set[int]:
        """Every address whose content depends on the inputs."""
        return self.reached(self.entries)

    def reached(self, start: Iterable[int]) -> set[int]:
        """Every address whose content depends on that of the given ones."""
        found = set(start)
        for event in self:
            if found.intersection(event.reads):
                found.update(event.writes)
        return found


@dataclass
class _Every(Mapping[Any, Listener]):
    """One listener for all operations: what a Tracer asks, and nothing else."""

    listener: Listener
    others: dict[Any, Listener] = field(default_factory=dict[Any, Listener])

    def __getitem__(self, key: Any) -> Listener:
        return self.listener

    def __iter__(self) -> Iterator[Any]:
        return iter(self.others)

    def __len__(self) -> int:
        return len(self.others)


class _Recorder:
    """Numbers the operations, copies those that are wanted, and replaces outputs."""

    def __init__(self, edits: Mapping[int, Edit], wanted: set[int] | None) -> None:
        self.events: dict[int, Event] = {}
        self._edits = edits
        self._wanted = wanted
        self._count = 0
        self._alive: list[Any] = []

    def __call__(self, operation: Operation) -> None:
        if operation.func is torch.ops.aten.detach.default:
            return  # PyTorch's own, where a tensor is held that it gives: only while recording
        place, self._count = self._count, self._count + 1
        wanted = self._wanted is None or place in self._wanted
        if not wanted and place not in self._edits:
            return
        output = _first(operation.output)
        with apart():
            if place in self._edits and output is not None:
                with torch.inference_mode(output.is_inference()):
                    output.copy_(self._edits[place](output.clone(), operation.args))
            if self._wanted is None:
                self._alive.append((operation.args, operation.output))
            if wanted:
                caller = operation.caller() if self._wanted is None else None
                self.events[place] = recorded(operation, place, caller)


def recorded(operation: Operation, place: int, caller: Caller | None) -> Event:
    """An operation that has just run, with copies of its tensors.

    Args:
        operation: inside ``apart()``.
        place: its number.
        caller: whose it is.
    """
    output = _first(operation.output)
    return Event(
        place,
        str(operation.func),
        tuple(_kept(a) for a in operation.args),
        {name: _kept(a) for name, a in operation.kwargs.items()},
        None if output is None else output.clone(),
        tuple(_addresses((operation.args, tuple(operation.kwargs.values())))),
        tuple(_addresses(operation.output)),
        caller,
    )


def traced(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    *,
    extra: Mapping[str, Any] | None = None,
    edits: Mapping[int, Edit] | None = None,
    wanted: set[int] | None = None,
) -> Trace:
    """Run a subject and record its operations.

    Args:
        subject: what runs.
        inputs: as ``Subject.run`` takes them.
        extra: likewise.
        edits: what the first tensor that an operation gives becomes, by the operation's place.
        wanted: the places to record; None: all of them, with their lines.
    """
    recorder = _Recorder(edits or {}, wanted)
    with Tracer(subject.given.model, _Every(recorder)):
        outcome = subject.run(inputs, extra)
    return Trace(recorder.events, outcome, frozenset(_addresses(list(inputs.values()))))


def _first(output: Any) -> Tensor | None:
    if isinstance(output, list | tuple):
        output = next((part for part in output if isinstance(part, Tensor)), None)  # pyright: ignore
    return output if isinstance(output, Tensor) else None


def _kept(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_kept(part) for part in value)  # pyright: ignore
    return value.clone() if isinstance(value, Tensor) else value


def _addresses(value: Any) -> Iterator[int]:
    if isinstance(value, list | tuple):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _addresses(part)
    elif isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr()
