"""One run of somebody's code under the capture of ``observe``: its attention and all its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.capture.fused_calls import FusedCall, fused_call
from regard.capture.met_value import Met, MetValue
from regard.capture.refusals import Absence
from regard.capture.storages import Parameters, storage_key, tensors_in
from regard.diagnosis.inputs.subject import kept_defaults, quiet
from regard.diagnosis.inputs.tape import Tape
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.query_key import QueryKeyScores
from regard.tracing.operations import PRODUCTS
from regard.tracing.tracer import Listener, Operation, Tracer, apart

__all__ = ["Attention", "Step", "Trace", "traced"]


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of a run.

    Attributes:
        name: of the operation, such as ``addmm``.
        inputs: the tensors that it read; the code may have changed them since.
        outputs: copies of the tensors that it gave.
        line: the ``file:line`` that ran it.
        projects: it is a product with numbers that do not follow from the inputs, or adds a
            parameter.
        depends: its outputs follow from the inputs.
        alive: the tensors that it gave; while they live, no other tensor gets their storage.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    line: str
    projects: bool
    depends: bool
    alive: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a run, in float64 and in the axes of the code.

    Attributes:
        module: the name of its module.
        query: the left factor of the scores, (..., q_len, head_dim); None if it is unknown.
        key: the right factor, (..., kv_len, head_dim).
        scores: the input of the softmax, (..., q_len, kv_len); -inf or very low where masked.
        sink: a column beside the scores, (..., q_len, 1).
        weights: what met the value, (..., q_len, kv_len).
        value: (..., kv_len, head_dim); None if each query has its own.
        output: weights @ value, in the code's own shape.
        live: the same as the code goes on with it, a part of the graph of its result.
        lines: the ``file:line`` of "product", "softmax" and "value".
        at: the number of the step that gave the output.
    """

    module: str
    query: Tensor | None
    key: Tensor | None
    scores: Tensor | None
    sink: Tensor | None
    weights: Tensor
    value: Tensor | None
    output: Tensor
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
    """

    attentions: tuple[Attention, ...]
    changed: tuple[Attention, ...]
    steps: tuple[Step, ...]
    refused: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]
    result: Any


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
    log = _Log(model, inputs)
    dtype = torch.get_default_dtype()
    with quiet():
        torch.set_default_dtype(torch.float64)
        try:
            with kept_defaults(call), Tracer(model, {}, log.listener_of), Tape(poisons=True):
                result = model(*args, **kwargs)
        finally:
            torch.set_default_dtype(dtype)
    log.met.finish()
    return Trace(
        tuple(log.attentions),
        tuple(log.changed),
        tuple(log.steps),
        tuple(log.refused),
        tuple(log.left),
        result,
    )


class _Log:
    """The listeners of a run; each operation becomes a step after the capture has seen it."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._inputs = {storage_key(t) for t in inputs}
        self.attentions: list[Attention] = []
        self.changed: list[Attention] = []
        self.steps: list[Step] = []
        self.refused: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        self.met = MetValue(
            model,
            lambda met: self.attentions.append(self._attention(met)),
            lambda _, reason, line: self.refused.append((reason, line)),
            lambda _, reason, line: self.left.append((reason, line)),
            Absence(model),
            self._note_changed,
        )
        self._parameters = Parameters(model)
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
            self._keep(operation)

        return listen

    def _keep(self, operation: Operation) -> None:
        inputs = tuple(tensors_in((operation.args, *operation.kwargs.values())))
        with apart():
            outputs = tuple(t.detach().clone() for t in tensors_in((operation.output,)))
        alive = tuple(tensors_in((operation.output,)))
        follow = [storage_key(t) in self._inputs for t in inputs]
        depends = any(follow)
        if depends:
            self._inputs.update(map(storage_key, alive))
        func = operation.func
        projects = False
        if func in PRODUCTS or func in _LAYERS:
            projects = depends and not all(follow)
        elif func in _ADDS:
            projects = any(self._parameters.has(t) or _is_parameter(t) for t in inputs)
            # Code that takes its parameters as arguments adds a row of numbers.
            projects |= depends and any(
                t.ndim == 1 and t.numel() > 1 and not own
                for t, own in zip(inputs, follow, strict=True)
            )
        name = str(func).split(".")[-2 if "." in str(func) else -1]
        line = operation.line()
        self.steps.append(Step(name, inputs, outputs, line, projects, depends, alive))

    def _read(self, call: FusedCall, operation: Operation) -> None:
        with apart(), torch.no_grad():
            matrix, value = call.read(operation.args, operation.kwargs)
            source = matrix.source
            assert isinstance(source, QueryKeyScores)
            output = next(tensors_in((operation.output,)))
            self.attentions.append(
                Attention(
                    operation.module() or "",
                    source.query.detach().clone(),
                    source.key.detach().clone(),
                    _scores_of(matrix),
                    None,
                    matrix.to_dense(limit=None),
                    value().detach().clone(),
                    output.detach().clone(),
                    output,
                    {"softmax": operation.line()},
                    len(self.steps),
                )
            )

    def _note_changed(self, met: Met) -> None:
        if not self.changed or self.changed[-1].at < len(self.steps):  # one product, one note
            self.changed.append(self._attention(met))

    def _attention(self, met: Met) -> Attention:
        assert self._operation is not None
        output = next(tensors_in((self._operation.output,)))
        evidence = met.evidence
        known = evidence is not None
        return Attention(
            met.name,
            evidence.query.detach().clone() if known else None,
            evidence.key.detach().clone() if known else None,
            evidence.scores.detach().clone() if known else None,
            evidence.sink.detach().clone() if known and evidence.sink is not None else None,
            met.weights.detach().clone(),
            None if met.value is None else met.value.detach().clone(),
            output.detach().clone(),
            output,
            dict(met.lines),
            len(self.steps),
        )


def _scores_of(matrix: AttentionMatrix) -> Tensor:
    """Return the masked scores of a matrix, (..., num_heads, q_len, kv_len)."""
    return matrix.scores[...].detach().clone()


def _is_parameter(tensor: Tensor) -> bool:
    base = tensor._base  # pyright: ignore[reportPrivateUsage]
    return isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)


_ATEN = torch.ops.aten
_ADDS = (_ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.sub.Tensor)
_LAYERS = (_ATEN.convolution.default, _ATEN.embedding.default, _ATEN.linear.default)
