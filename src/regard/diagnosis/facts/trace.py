"""One run of somebody's code under the capture of ``observe``: its attention and all its steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.capture.fused_calls import FusedCall, fused_call
from regard.capture.met_value import Met, MetValue
from regard.capture.refusals import Absence
from regard.capture.storages import Parameters, storage_key, tensors_in
from regard.diagnosis.inputs.subject import kept_defaults, quiet
from regard.diagnosis.inputs.tape import Step, Tape
from regard.scores.query_key import QueryKeyScores
from regard.tracing.tracer import Listener, Operation, Tracer, apart


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a run, in float64 and in the axes of the code.

    Attributes:
        module: the name of its module.
        query: the left factor of the scores, (..., q_len, head_dim); None if it is unknown.
        key: the right factor, (..., kv_len, head_dim).
        weights: what met the value, (..., q_len, kv_len).
        value: (..., kv_len, head_dim); None if each query has its own.
        live: weights @ value as the code goes on with it, a part of the graph of its result.
        lines: the ``file:line`` of "product", "softmax" and "value".
        at: the number of the step that gave the output.
    """

    module: str
    query: Tensor | None
    key: Tensor | None
    weights: Tensor
    value: Tensor | None
    live: Tensor
    lines: Mapping[str, str]
    at: int


@dataclass(frozen=True, eq=False)
class Trace:
    """One run.

    Attributes:
        attentions: in the order of the run.
        changed: the softmaxes that met a value as no weights of its rows, likewise.
        steps: all operations.
        refused: why operations that look like attention are none, with their lines.
        left: why weights met no value, likewise.
        result: everything that the code gave back.
        model: the module that ran, or the function as one.
    """

    attentions: tuple[Attention, ...]
    changed: tuple[Attention, ...]
    steps: tuple[Step, ...]
    refused: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]
    result: Any
    model: nn.Module


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def traced(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
) -> Trace:
    """Run code once in float64 and return its trace.

    Args:
        call: a module in float64 that nothing else uses, or a function.
        args: by position, which the code may change.
        kwargs: likewise by name.
        inputs: those of them that hold numbers of tokens; all others are like parameters.

    Raises:
        Exception: whatever the code raises.
    """
    model = call if isinstance(call, nn.Module) else _Function(call)
    tape = Tape(keeps=True, poisons=True)
    log = _Log(model, tape.steps)
    with quiet():
        torch.set_default_dtype(torch.float64)
        with kept_defaults(call), Tracer(model, {}, log.listener_of), tape:
            result = model(*args, **kwargs)
    log.met.finish()
    # The line of the capture is that of the caller of check where no line is the code's.
    code_lines = {step.line for step in tape.steps}

    def with_code_lines(attention: Attention) -> Attention:
        lines = {s: line if line in code_lines else "" for s, line in attention.lines.items()}
        return replace(attention, lines=lines)

    return Trace(
        tuple(map(with_code_lines, log.attentions)),
        tuple(map(with_code_lines, log.changed)),
        tuple(_followed(tape.steps, model, inputs)),
        tuple(log.refused),
        tuple(log.left),
        result,
        model,
    )


class _Log:
    """The listeners of a run; each of them runs before its operation becomes a step."""

    def __init__(self, model: nn.Module, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.attentions: list[Attention] = []
        self.changed: list[Attention] = []
        self.refused: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        self.met = MetValue(
            model,
            self._record,
            lambda _, reason, line: self.refused.append((reason, line)),
            lambda _, reason, line: self.left.append((reason, line)),
            Absence(model),
            self._note_changed,
        )
        self._operation: Operation | None = None

    def listener_of(self, func: Callable[..., Any]) -> Listener:
        fused = fused_call(func)
        inner = None
        if fused is None:
            inner = self.met.listeners.get(func) or self.met.listener_of(func)

        def listen(operation: Operation) -> None:
            self._operation = operation
            if fused is not None:
                self._read(fused, operation)
            elif inner is not None:
                inner(operation)

        return listen

    def _read(self, call: FusedCall, operation: Operation) -> None:
        with apart(), torch.no_grad():
            matrix, value = call.read(operation.args, operation.kwargs)
            source, weights = matrix.source, matrix.to_dense(limit=None)
            assert isinstance(source, QueryKeyScores)
            parts = (source.query, source.key, weights, value())
            lines = {"softmax": operation.line()}
            self.attentions.append(self._attention(operation.module() or "", parts, lines))

    def _record(self, met: Met) -> None:
        if not met.is_again:
            self.attentions.append(self._of_met(met))

    def _note_changed(self, met: Met) -> None:
        if not self.changed or self.changed[-1].at < len(self._steps):  # one product, one note
            self.changed.append(self._of_met(met))

    def _of_met(self, met: Met) -> Attention:
        pair = (None, None) if met.evidence is None else (met.evidence.query, met.evidence.key)
        return self._attention(met.name, (*pair, met.weights, met.value), met.lines)

    def _attention(
        self, name: str, parts: Iterable[Tensor | None], lines: Mapping[str, str]
    ) -> Attention:
        """Return an attention of copies of its query, key, weights and value."""
        assert self._operation is not None
        live = next(tensors_in((self._operation.output,)))
        query, key, weights, value = (None if t is None else t.detach().clone() for t in parts)
        assert weights is not None
        return Attention(name, query, key, weights, value, live, dict(lines), len(self._steps))


def _followed(steps: Sequence[Step], model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[Step]:
    """Yield the steps with which of them follow from the inputs, and which of these project."""
    storages = {storage_key(tensor) for tensor in inputs}
    parameters = Parameters(model)
    for step in steps:
        follow = [storage_key(tensor) in storages for tensor in step.inputs]
        depends, projects = any(follow), False
        if depends:
            storages.update(map(storage_key, step.alive))
        if step.name in _PROJECTING:
            projects = depends and not all(follow)
        elif step.name in _ADDS:
            projects = any(parameters.has(t) or _is_parameter(t) for t in step.inputs)
            # Code that takes its parameters as arguments adds a row of numbers.
            projects |= depends and any(
                tensor.ndim == 1 and tensor.numel() > 1 and not follows
                for tensor, follows in zip(step.inputs, follow, strict=True)
            )
        yield replace(step, depends=depends, projects=projects)


def _is_parameter(tensor: Tensor) -> bool:
    base = tensor._base  # pyright: ignore[reportPrivateUsage]
    return isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)


_ADDS = ("add", "add_", "sub")
_PROJECTING = (
    *("mm", "bmm", "mv", "dot", "vdot", "addmm", "addmm_", "baddbmm", "baddbmm_"),
    *("convolution", "embedding", "linear"),
)
