"""Conversion of the operations between a product and its softmax to steps on scores."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.element_axes import Axes
from regard.capture.provenance import Scores, Track
from regard.capture.score_chain import Fill, Plus, Sink, Step, Tanh, Times
from regard.tracing.operations import (
    ASSIGNMENTS,
    BOUNDS,
    DIFFERENCES,
    MULTIPLICATIONS,
    NEGATIONS,
    NO_NAN,
    QUOTIENTS,
    REVERSED_DIFFERENCES,
    SUMS,
    TANH,
    WHERE,
)
from regard.tracing.tracer import Operation, apart

__all__ = ["STEPS", "next_scores", "one_number", "with_sink"]

_Steps = Sequence[Step]

STEPS: tuple[Callable[..., Any], ...] = (
    *(*SUMS, *DIFFERENCES, *REVERSED_DIFFERENCES, *MULTIPLICATIONS, *QUOTIENTS, *NEGATIONS),
    *(*TANH, *WHERE, *ASSIGNMENTS, *BOUNDS, *NO_NAN),
)
"""The operations that an AttentionMatrix may represent, on scores or on weights."""


def next_scores(
    operation: Operation, source: Tensor, track: Track, scores: Scores
) -> tuple[Scores, Axes] | None:
    """Return the scores after one of ``STEPS``, and the axes of the storage of its output.

    ``source`` is the argument that holds the scores. The result is None if a matrix cannot
    represent the operation with these arguments.
    """
    output = cast(Tensor, operation.output)
    axes = track.axes
    seen = None if axes is None else axes.of_view(source)
    moved = None if seen is None else seen.moved(output)
    if axes is None or seen is None or moved is None:
        return None
    in_place = source.data_ptr() == output.data_ptr()
    if operation.func in ASSIGNMENTS and in_place:
        with apart():
            return _assigned_in_place(operation, axes, scores)
    with apart():
        steps = _steps(operation, source, moved)
    if steps is None or (in_place and math.prod(seen.sizes) != math.prod(axes.sizes)):
        return None
    return replace(scores, steps=(*scores.steps, *steps)), axes if in_place else moved


def _steps(operation: Operation, source: Tensor, axes: Axes) -> _Steps | None:
    func, args = operation.func, operation.args
    if func in MULTIPLICATIONS or func in QUOTIENTS:
        first, by = args[:2]
        if first is not source:
            if func in QUOTIENTS:
                return None
            first, by = by, first
        if isinstance(by, Tensor) and by.numel() > 1 and bool(operation.output.isnan().any()):
            return None  # -inf times 0 gives NaN
        return (Times(by, axes, divides=func in QUOTIENTS),)
    if func in NEGATIONS:
        return (Times(-1.0, axes),)
    if func in SUMS or func in DIFFERENCES:
        factor = _alpha_of(operation) if func in SUMS else -_alpha_of(operation)
        first, other = args[:2]
        if first is source:
            return (Plus(other, axes, factor),)
        return Times(factor, axes), Plus(first, axes)
    if func in REVERSED_DIFFERENCES and args[0] is source:
        return Times(-_alpha_of(operation), axes), Plus(args[1], axes)
    if func in TANH:
        return (Tanh(axes),)
    if func in WHERE:
        where, chosen, other = args[:3]
        where, number = where.bool(), one_number(other if chosen is source else chosen)
        filled = ~where if chosen is source else where
        return None if number is None else (Fill(filled, axes, number),)
    if func in ASSIGNMENTS:
        return _assigned(operation, axes)
    if func in BOUNDS:
        output = cast(Tensor, operation.output)
        return () if output is not source and torch.equal(output, source) else None
    return None


def _assigned(operation: Operation, axes: Axes) -> _Steps | None:
    args, number = operation.args, _assigned_number(operation)
    if number is None:
        return None
    if "masked_fill" in str(operation.func):
        where = args[1]
    else:
        where = torch.zeros(args[0].shape, dtype=torch.bool, device=args[0].device)
        _mark(where, operation)
    return (Fill(where, axes, number),)


def _assigned_in_place(
    operation: Operation, axes: Axes, scores: Scores
) -> tuple[Scores, Axes] | None:
    """Return scores after some were set to one number; consecutive equal fills are merged."""
    number = _assigned_number(operation)
    if number is None:
        return None
    fill = Fill(_written_places(operation, axes), axes, number)
    last = scores.steps[-1] if scores.steps else None
    if isinstance(last, Fill) and last.axes is axes and last.value == number:
        fill = replace(fill, where=last.where | fill.where)
        return replace(scores, steps=(*scores.steps[:-1], fill)), axes
    return replace(scores, steps=(*scores.steps, fill)), axes


def _assigned_number(operation: Operation) -> float | None:
    """Return the number that an assignment writes; None if it adds or writes several."""
    args = operation.args
    accumulates = isinstance(args[1], list | tuple) and len(args) > 3 and bool(args[3])
    return None if accumulates else one_number(args[ASSIGNMENTS[operation.func]])


def with_sink(
    operation: Operation, scores: Sequence[Scores | None], tracks: Sequence[Track | None]
) -> tuple[Scores, Axes] | None:
    """Return scores after a sink column was concatenated, and the axes of the output.

    ``scores`` and ``tracks`` have one entry for each tensor of the concatenation. The result is
    None if the operation does not add one column to scores.
    """
    tensors = cast(list[Tensor], operation.args[0])
    output = cast(Tensor, operation.output)
    if len(tensors) != 2 or sum(each is not None for each in scores) != 1:
        return None
    at = 0 if scores[0] is not None else 1
    source, other, track = tensors[at], tensors[1 - at], tracks[at]
    dim: int = operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else 0)
    dim %= output.ndim
    axes = None if track is None else track.of_view(source)
    if other.ndim != source.ndim or other.shape[dim] != 1 or axes is None:
        return None
    before, own = at == 1, cast(Scores, scores[at])
    start = axes.start - (axes.places[dim] if before else 0)
    step = Sink(other, axes, before)
    return replace(own, steps=(*own.steps, step)), Axes.of(output, axes.places, start)


def _alpha_of(operation: Operation) -> float:
    """Return the factor ``alpha`` of the second operand of a sum or a difference."""
    given = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("alpha", 1)
    return float(given)


def one_number(value: object) -> float | None:
    """Return a number, or the only value in a tensor; None if its elements differ."""
    if not isinstance(value, Tensor):
        return float(cast(float, value))
    value = value.detach()
    first = value.flatten()[0] if value.numel() else None
    return float(first) if first is not None and bool((value == first).all()) else None


def _written_places(operation: Operation, axes: Axes) -> Tensor:
    """Return True for each element that an assignment to a view writes, on the given axes."""
    view: Tensor = operation.args[0]
    length = view.untyped_storage().nbytes() // view.element_size()
    where = torch.zeros(length, dtype=torch.bool, device=view.device)
    _mark(where.as_strided(view.shape, view.stride(), view.storage_offset()), operation)
    return where.as_strided(axes.sizes, axes.strides, axes.offset)


def _mark(where: Tensor, operation: Operation) -> None:
    args = operation.args
    match str(operation.func).split(".")[1].rstrip("_"):
        case "masked_fill":
            where.masked_fill_(args[1], True)
        case "index_put":
            true = torch.tensor(True, device=where.device)
            torch.ops.aten.index_put_.default(where, args[1], true)
        case _:
            where.fill_(True)
