"""Tracking of softmax weights through operations that may change them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from regard.capture.element_axes import Axes
from regard.capture.provenance import Track, Weights
from regard.capture.score_operations import one_number
from regard.masks import Keep
from regard.matrix.attention_matrix import AttentionMatrix
from regard.tracing.operations import ASSIGNMENTS, MULTIPLICATIONS, NO_NAN, QUOTIENTS
from regard.tracing.tracer import Operation

__all__ = [
    "after_operation",
    "change_of",
    "place_of",
    "tensors_in",
    "without_rows",
    "written_by",
]


def after_operation(
    operation: Operation, source: Tensor, track: Track, weights: Weights, *, noisy: bool
) -> tuple[Weights, Axes | None] | None:
    """Return the weights and their axes after an operation of the table.

    Three changes are allowed. Dropout may set some weights to 0 and scale the others. Whole rows
    may become 0, such as those of a head that is switched off. Rows without a key may become 0
    instead of NaN. The result is None for any other change.

    ``source`` is the argument that holds the weights. It is ``noisy`` if another argument holds
    random numbers.
    """
    output = cast(Tensor, operation.output)
    seen = track.of_view(source)
    if seen is None:
        return None
    own = weights.attention
    if track.lies_in(output):
        axes = cast(Axes, track.axes)
        whole = axes.whole_of(output)
        dim = axes.along(own.place, own.length)
        if noisy:
            dropped = replace(weights, is_dropped=True)
            return (dropped, axes) if operation.func in MULTIPLICATIONS else None
        if dim is None or not _keeps_in_place(operation, whole, dim):
            return None
        return _noting_empty_rows(weights, (whole == 0).all(dim)), axes
    axes = seen.moved(output)
    dim = None if axes is None else axes.along(own.place, own.length)
    if axes is None or dim is None:
        return None
    before = source.to(output.dtype).reshape(output.shape)
    rounding = 2 * torch.finfo(output.dtype).eps
    same = torch.isclose(output, before, rtol=rounding, atol=0, equal_nan=True)
    same |= before.isnan() & (output == 0)
    if noisy and _is_thinned(before, output):
        return replace(weights, is_dropped=True), axes
    same |= (output == 0).all(dim, keepdim=True)
    if not bool(same.all()):
        return None
    return _noting_empty_rows(weights, (output == 0).all(dim) & (before > 0).any(dim)), axes


def _noting_empty_rows(weights: Weights, rows: Tensor) -> Weights:
    is_one_empty = not weights.is_dropped and bool(rows.any())
    return replace(weights, may_have_empty_rows=weights.may_have_empty_rows or is_one_empty)


def _keeps_in_place(operation: Operation, whole: Tensor, dim: int) -> bool:
    """Return True if every row of the weights sums to 1 or 0 after an in-place operation."""
    func, args = operation.func, operation.args
    if func in ASSIGNMENTS and one_number(args[ASSIGNMENTS[func]]) != 0:
        return False
    if func not in (*ASSIGNMENTS, *MULTIPLICATIONS, *QUOTIENTS, *NO_NAN):
        return False
    near = 1e-4 if whole.dtype.itemsize > 2 else 0.05
    sums = whole.sum(dim, dtype=whole.dtype if whole.dtype.itemsize > 2 else torch.float32)
    return bool(((sums == 0) | sums.isnan() | ((sums - 1).abs() <= near)).all())


def _is_thinned(before: Tensor, output: Tensor) -> bool:
    """Return True if some elements became 0 and one factor of at least 1 scaled all others."""
    kept = (output != 0) & (before != 0)
    factors = (output / before)[kept]
    largest = factors.max() if factors.numel() else factors.new_ones(())
    return bool((largest > 0.99) & (factors > 0.99 * largest).all())


def without_rows(matrix: AttentionMatrix, empty_rows: Tensor | None) -> AttentionMatrix:
    """Return the same attention with some rows masked completely.

    ``empty_rows`` is True for these rows, (..., num_heads, q_len, 1); None for no rows.
    """
    if empty_rows is None or not (empty_rows & (matrix.logsumexp() > -torch.inf)[..., None]).any():
        return matrix
    rows = ~empty_rows
    for axis in range(rows.ndim):
        first = rows.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(rows), rows):
            rows = first
    keep = Keep(rows.clone(memory_format=torch.contiguous_format))
    mask = keep if matrix.mask is None else matrix.mask & keep
    return AttentionMatrix(matrix.source, mask.bind(matrix.shape, matrix.device))


def change_of(operation: Operation, line: str) -> str:
    """Return the message that an operation changed the weights of the softmax at a line."""
    return (
        f"{place_of(operation)} makes others of the weights after their softmax ({line}); "
        "what meets the value is no softmax of the scores.\n"
        "    Mask, scale and reorder before the softmax, and multiply its weights with the value."
    )


def written_by(operation: Operation) -> Iterator[Tensor]:
    """Yield the tensors whose elements an operation has changed in place, not only their views."""
    func = operation.func
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags:
        return
    for place, argument in enumerate(func._schema.arguments):  # pyright: ignore[reportPrivateUsage]
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = operation.args[place] if place < len(operation.args) else None
            yield from tensors_in((operation.kwargs.get(argument.name, given),))


def place_of(operation: Operation) -> str:
    """Return the name of an operation with its ``file:line``."""
    return f"{str(operation.func).split('.')[1]} ({operation.place()})"


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, including those in lists and tuples."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(cast(Iterable[Any], argument))
