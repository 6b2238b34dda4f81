"""The axes of an attention matrix, found in a product, in its weights and in the value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes, contiguous, translated

__all__ = ["Layout", "Unsupported", "WeightAxes", "layout_of"]


class Unsupported(ValueError):
    """An operation between product and softmax that an AttentionMatrix cannot represent."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of the attention matrix, with their strides in the product.

    Attributes:
        axes: the axes in the order batch..., query, key.
        query_is_left: True if the query is the left factor of the product.
    """

    axes: Axes
    query_is_left: bool


def layout_of(
    product: Product,
    final: Axes,
    dim: int,
    passed: Sequence[Axes],
    inputs: Sequence[Sequence[Tensor]],
    *,
    heads_first: bool = False,
) -> Layout:
    """Return the layout of the attention matrix whose weights a softmax over ``dim`` computed.

    Args:
        product: the product of query and key.
        final: the axes of the scores that were the input of the softmax.
        dim: the axis of the softmax.
        passed: the axes of the scores at each step; the ones that split the batch furthest count.
        inputs: the tensor arguments of each running ``forward``; their shapes separate batch and
            heads if both are merged into one axis.
        heads_first: True if heads may come before the batch in the merged axis.

    Raises:
        Unsupported: the softmax runs over neither queries nor keys, or over a part of the keys.
    """
    layout = _finest(product, passed, final, dim)
    split = _with_heads(layout, inputs)
    if heads_first and split is not layout and split.axes.sizes[0] > 1 < split.axes.sizes[1]:
        raise Unsupported(
            "is taken of scores with batch and heads in one axis, and heads may come first.\n"
            "    Merge them with the batch first, or view the scores as (batch, heads, ...)."
        )
    return split


def _finest(product: Product, passed: Sequence[Axes], final: Axes, dim: int) -> Layout:
    layout = _layout(product, final, dim)
    whole = math.prod(final.sizes)
    for seen in sorted(passed, key=lambda axes: -len(axes.sizes)):
        if len(seen.sizes) <= len(final.sizes) or seen.start != final.start:
            continue
        if math.prod(seen.sizes) != whole:
            continue
        along = [axis for axis, n in enumerate(seen.sizes) if n == final.sizes[dim] > 1]
        for axis in along:
            if seen.places[axis] == final.places[dim]:
                return _layout(product, seen, axis)
    return layout


def _layout(product: Product, axes: Axes, dim: int) -> Layout:
    unit, row, _ = product.places
    kinds = [
        "one" if size == 1 else _kind(place, row, unit)
        for size, place in zip(axes.sizes, axes.places, strict=True)
    ]
    if kinds[dim] == "one":
        kinds[dim] = "row" if row > 1 and unit == row else "column"
    if kinds[dim] == "batch":
        raise Unsupported(
            f"runs over axis {dim}, along which neither queries nor keys lie.\n"
            "    Take the softmax over the axis of the keys, dim=-1."
        )
    other = "row" if kinds[dim] == "column" else "column"
    if kinds.count(kinds[dim]) > 1 or "mixed" in kinds:
        raise Unsupported("runs over a part of the keys.")
    rows = [axis for axis, kind in enumerate(kinds) if kind == other]
    near = [axis for axis in (dim - 1, dim + 1) if 0 <= axis < len(kinds) and kinds[axis] == "one"]
    if rows:
        rows = [min(rows, key=lambda axis: axes.places[axis])]
    rows = (rows or near)[:1]
    batch = [axis for axis in range(len(kinds)) if axis not in (*rows, dim)]
    order = (*batch, *rows, dim)
    sizes, places = ([values[axis] for axis in order] for values in (axes.sizes, axes.places))
    if not rows:
        sizes.insert(-1, 1)
        places.insert(-1, 0)
    arranged = Axes(tuple(sizes), (0,) * len(sizes), 0, tuple(places), axes.start)
    return Layout(arranged, kinds[dim] == "column")


def _with_heads(layout: Layout, inputs: Sequence[Sequence[Tensor]]) -> Layout:
    """Split an axis that merges batch and heads in two, if the batch size is known."""
    if len(layout.axes.sizes) != 3:
        return layout
    merged, q_len, kv_len = layout.axes.sizes
    batches = [_batch_of(tensors, q_len, kv_len) for tensors in inputs]
    batch = min((n for n in batches if n is not None and merged % n == 0), default=None)
    if batch is None:
        return layout
    sizes = (batch, merged // batch, q_len, kv_len)
    places = (layout.axes.places[0] * sizes[1], *layout.axes.places)
    return replace(layout, axes=replace(layout.axes, sizes=sizes, places=places))


def _batch_of(inputs: Sequence[Tensor], q_len: int, kv_len: int) -> int | None:
    """Return the batch size of the arguments of a ``forward``; None if it cannot be determined."""
    floats = [t for t in inputs if not t.is_nested and t.is_floating_point()]
    # A tensor of shape (..., q_len, kv_len) is a mask or bias, unless it is the only one.
    tokens = [t for t in floats if t.shape[-2:] != (q_len, kv_len)] or floats[:1]
    for tensor in tokens:
        match tuple(tensor.shape):
            case (length, _) if length == q_len:
                return None
            case (batch, length, _) if length == q_len and tensor.shape != (1, q_len, kv_len):
                return batch
            case (length, batch, _) if length == q_len:
                return batch
            case _:
                pass
    return None


def _kind(place: int, row: int, unit: int) -> str:
    if place < row:
        return "column"
    if place < unit:
        return "mixed" if place % row else "row"
    return "mixed" if place % unit else "batch"


@dataclass(eq=False, slots=True)
class WeightAxes:
    """The axes of weights that have not been multiplied by a value yet.

    Attributes:
        axes: the axes of the attention matrix, with their strides in the output of the softmax.
        are_joined: True if the last two axes of heads are one axis in the attention matrix.
    """

    axes: Axes
    are_joined: bool = False

    @classmethod
    def of(cls, weights: Tensor, seen: Axes, matrix: Axes, ndim: int) -> "WeightAxes | None":
        """Return the axes of the weights from a softmax; None if they cannot be determined.

        ``seen`` are the axes of the weights and ``matrix`` those of the attention matrix, which has
        ``ndim`` axes. Both have strides in the product of query and key.
        """
        basis = zip(seen.sizes, seen.places, contiguous(weights.shape), strict=True)
        found = translated(basis, matrix.sizes, matrix.places, matrix.start - seen.start)
        if found is None:
            return None
        axes = Axes(matrix.sizes, matrix.strides, matrix.offset, *found)
        return cls(axes, are_joined=ndim < len(matrix.sizes))

    def empty_rows(self, weights: Tensor) -> Tensor:
        """Return True for each row of the matrix that is 0, (..., num_heads, q_len, 1)."""
        rows = (weights == 0).all(-1, keepdim=True)
        return rows.flatten(-4, -3) if self.are_joined else rows

    def value(self, weights: Axes, factor: Tensor) -> Tensor | None:
        """Return a view of the value, (..., num_kv_heads, kv_len, head_dim), on the matrix's axes.

        An axis along which the value is constant has size 1. ``weights`` are the axes (batch, rows,
        keys) of the weights, ``factor`` is the other factor, (batch, keys, head_dim). The result is
        None if no view has these axes.
        """
        operand = factor.detach()[:, None]
        view = weights.arranged(operand[..., 0], self.axes)
        if view is None or view.shape[-2] > 1:
            return None
        laid = operand.as_strided(
            (*view.shape[:-2], view.shape[-1], operand.shape[-1]),
            (*view.stride()[:-2], view.stride(-1), operand.stride(-1)),
            view.storage_offset(),
        )
        laid = laid.expand(*laid.shape[:-2], self.axes.sizes[-1], laid.shape[-1])
        if not self.are_joined:
            return laid
        if laid.shape[-3] == 1:
            return laid.squeeze(-3)
        return laid.expand(*laid.shape[:-4], *self.axes.sizes[-4:-2], *laid.shape[-2:]).flatten(
            -4, -3
        )
