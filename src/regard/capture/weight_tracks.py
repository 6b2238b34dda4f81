"""The storages that descend from a product of two activations, and their axes in that product.

A Track says what is known of one storage: the product, its axes, the softmax that was taken. The
functions read from it the shape that a model gave to weights, and the query and key of each.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes, contiguous, translated
from regard.capture.evidence import Evidence
from regard.capture.score_steps import Steps
from regard.capture.storages import tensors_in
from regard.tracing.tracer import Operation

Part = tuple[tuple[tuple[int, int], ...], int]
"""The size and step of each longer axis of weights, and their first element, in their product."""

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""The sizes, strides and offset of a view of a storage."""

_LAST_VIEWS = 16
"""The number of views of a storage that are kept; a loop over rows takes as many as it has rows."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Softmax:
    """The softmax of scores, or the exponential of a softmax that is written out.

    Attributes:
        name: the name of its module; None outside the model.
        line: its ``file:line``.
        scores: its input; None after the weights met a value, or if it has no known axes.
        axes: the axes of its input in the product; None if they are unknown.
        dim: the axis that it runs over.
        steps: the steps from the product to its input.
        product: the product of query and key; None if its input does not descend from one product.
        is_written_out: True for an exponential.
        is_of_scores: False for the softmax of anything but a product of two activations.
        is_over_features: True if it runs over features of a linear layer, as a router of experts
            does; None if that is unknown.
        is_choice: True if it runs over all features of ``nn.Linear``, once for each row.
        is_met: True if its weights met a value, or are a part of other weights.
        index: its number among the softmaxes that ran; 0 for one that is written out.
        parts: the parts of its weights that were recorded, each with the module's name.
        fate: what was done to its weights that observe does not follow, and where; else "".
    """

    name: str | None
    line: str
    scores: Tensor | None
    axes: Axes | None
    dim: int
    steps: Steps
    product: Product | None = None
    is_written_out: bool = False
    is_of_scores: bool = True
    is_over_features: bool | None = False
    is_choice: bool = False
    is_met: bool = False
    index: int = 0
    parts: list[tuple[str, Part]] = field(default_factory=list[tuple[str, Part]])
    fate: str = ""

    def meet(self) -> None:
        """Note that its weights met a value, or are a part of other weights."""
        self.is_met = True

    def free(self) -> None:
        """Drop the scores, which nothing needs any more, even while the model keeps the weights."""
        self.scores = None


@dataclass(frozen=True, slots=True)
class Track:
    """A storage that descends from a product of two activations.

    Attributes:
        product: the product; None if it is unknown, or there are several.
        axes: the axes in the numbering of the product, or of the softmax without a product.
        steps: the steps from the product.
        softmax: the softmax that was taken; None for scores.
        rounding: the largest relative error of a dtype that the weights had since the softmax.
        before: the weights before dropout, what multiplied them, and the axes of both.
        is_changed: True if more than a copy was made since the product.
        shape: the shape in which the last operation computed it that is no copy.
        shapes: the views that the model took of the storage; the first two show how it was made.
    """

    product: Product | None
    axes: Axes | None
    steps: Steps
    softmax: Softmax | None = None
    rounding: float = 0.0
    before: tuple[Tensor, Tensor, Axes | None] | None = None
    is_changed: bool = False
    shape: tuple[int, ...] = ()
    shapes: list[Geometry] = field(default_factory=list[Geometry])

    def into(self, tensor: Tensor, **changes: Any) -> "Track":
        """Return the track of a new storage, whose tensor is given."""
        return replace(self, **{"shape": tensor.shape, "shapes": [geometry(tensor)], **changes})

    def note_view(self, view: Tensor) -> None:
        """Record a view that the model took of the storage."""
        self.shapes.append(geometry(view))
        del self.shapes[2:-_LAST_VIEWS]


def lines_of(operation: Operation, track: Track) -> dict[str, str]:
    """Return the ``file:line`` of each stage of an attention whose value has just been met."""
    lines = {"value": operation.line()}
    if track.product is not None:
        lines["product"] = track.product.line
    if track.softmax is not None:
        lines["softmax"] = track.softmax.line
    return lines


def is_of_scores(track: Track) -> bool:
    """Return True for weights of a softmax of scores."""
    return track.softmax is not None and track.softmax.is_of_scores


def is_outer(track: Track) -> bool:
    """Return True for a product over one number, as that of positions and frequencies."""
    return track.product is not None and track.product.left.shape[-1] == 1


def is_like(track: Track, source: Tensor, size: int, output: Tensor) -> bool:
    """Return True if an output may hold the scores or weights that its operation read.

    ``size`` is the number of elements that were read.
    """
    if output.is_nested or not output.ndim or not are_dense_reals(output):
        return False
    count, row = output.numel(), max(source.shape[-1:], default=1)
    if not source.is_floating_point():
        return count >= size
    if not output.is_floating_point() or track.softmax is not None:
        return count * row >= size and (count <= 2 * size or output.shape[-1] == row)
    if output.shape[-2:] == source.shape[-2:] and output.ndim > 1:
        return True
    return size <= 2 * count and (count <= 2 * size or output.shape[-1] == row)


def are_dense_reals(tensor: Tensor) -> bool:
    """Return True for a tensor whose products are read: neither sparse nor complex."""
    return tensor.layout == torch.strided and not tensor.is_complex()


def is_over_heads(track: Track, side: Tensor) -> bool:
    """Return True if a product sums scores or weights over their heads, as talking heads do."""
    if track.axes is None or side.shape[-1] == 1:
        return False
    if track.product is not None:
        head = track.product.steps[0]
    elif track.softmax is not None and len(track.shape) > 2:
        head = contiguous(track.shape)[-3]
    else:
        return False
    axes = track.axes.of_view(
        side[(slice(0, 1),) * (side.ndim - 1)]
    )  # one row: einsum merges the others
    return axes is not None and axes.steps[-1] >= head


def is_over_rows_of_parameter(product: Product | None, axes: Axes | None, dim: int) -> bool | None:
    """Return True if an axis of scores of a parameter has its rows, as the experts of a router.

    The result is False if it has the tokens, as for a learned query, and None for other scores.
    """
    if product is None or product.parameter is None or axes is None:
        return None
    return (axes.steps[dim] >= product.steps[1]) == (product.parameter is product.left)


def has_one_key(track: Track) -> bool:
    """Return True for weights over a single key."""
    if track.softmax is None:
        return track.is_changed and track.product is not None and track.shape[-1] == 1
    scores = track.softmax.scores
    return scores is not None and scores.shape[track.softmax.dim] == 1


def apart_from_heads(track: Track, side: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (batch, heads, rows, keys) where their product sums over heads and keys.

    Their value is (batch, heads, keys, head_dim). Other weights are returned as they are.
    """
    given = None if track.softmax is None else track.softmax.axes
    keys = track.shape[-1] if given is None else given.sizes[cast(Softmax, track.softmax).dim]
    if track.axes is None or track.product is None or keys >= side.shape[-1]:
        return side, value
    factors = zip(track.product.steps[1:], track.product.sizes[1:], strict=True)
    steps = [step for step, size in factors if size > 1]
    length, last = side.shape[-1], max(side.stride(-1), 1)
    for size, stride, step in zip(
        track.axes.sizes, track.axes.strides, track.axes.steps, strict=True
    ):
        inner = stride // last
        count = length // max(size * inner, 1)
        is_inside = inner * last == stride and count * size * inner == length
        if step in steps and 1 < size < length and is_inside:
            parts = (count, size, inner)
            split = cast(Tensor, side.unflatten(-1, parts)).permute(0, 2, 4, 1, 3)
            of_value = cast(Tensor, value.unflatten(-2, parts)).permute(0, 1, 3, 2, 4)
            return split.squeeze((1, 2)), of_value.squeeze((1, 2))
    return side, value


def shaped_weights(operation: Operation, track: Track, side: Tensor) -> Tensor:
    """Return weights (batch, rows, keys) in the shape that the model gave them.

    Its last axis are the keys, the one before are the rows of the last computation or of the
    product. Of several shapes, the last one with the most axes counts; matmul itself makes others
    with fewer.
    """
    if side.ndim > 3:
        return side.squeeze(0) if side.ndim > len(track.shape) else side
    batch, rows, _ = side.shape
    shape = track.shape
    best, most = side, (False, -1, False)
    for view in _views(track, side):
        height = view.shape[-2]
        if rows == 1 < height:
            view = view.unsqueeze(-2)  # each query was multiplied by itself
        elif query_axis(track, view) is None and (
            height not in (rows, *shape[-2:-1]) or rows % height
        ):
            continue
        long = sum(size > 1 for size in view.shape)
        axes = view.shape[-2] in shape[-2:-1], long, view.ndim == len(shape)
        if axes >= most:
            best, most = view, axes
    if best is side and batch == 1:
        return side.squeeze(0)
    module = operation.innermost()
    if isinstance(module, nn.MultiheadAttention) and batch == best.shape[0]:
        # PyTorch's own MultiheadAttention merges batch and heads.
        is_merged = best.ndim == operation.local("query").ndim == 3
        if is_merged and type(module).forward is nn.MultiheadAttention.forward:
            return cast(Tensor, best.unflatten(0, (-1, cast(int, module.num_heads))))
    if module is None or best.ndim != 4 or not hasattr(module, "config"):
        return best
    return best.flatten(1, 2)[:, :, None] if has_packed_heads(module, best.shape[1:3]) else best


def has_packed_heads(module: nn.Module, sizes: Sequence[int]) -> bool:
    """Return True if both axes between batch and features have the heads of one query.

    transformers packs heads that share a key in this way (``pack_gqa``).
    """
    group = getattr(module, "num_key_value_groups", 1)
    if group == 1 or sizes[1] != group:
        return False
    num_heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if num_heads is None:
        raise ValueError(
            f"query has {group} tokens or heads in one axis, and its module has no "
            "config.num_attention_heads that says which.\n"
            "    Observe it with attn_implementation='eager'."
        )
    return sizes[0] * group == num_heads


def query_axis(track: Track, shaped: Tensor) -> int | None:
    """Return the axis of the queries if weights (..., keys) do not have it before the keys.

    Einsum makes a batch of the queries where each of them has a value of its own, and puts the
    queries before heads that share a value.
    """
    axes = None if track.axes is None else track.axes.of_view(shaped)
    if axes is None or (axes.sizes[-2] > 1 and not axes.steps[-2]):
        return None  # rows that are repeated
    pairs = [*zip(axes.steps, axes.sizes, strict=True)]
    given = None if track.softmax is None else track.softmax.axes
    if track.product is None:
        # Of other scores, the axis before the last one of the softmax has the queries.
        if given is None or len(given.sizes) < 3 or axes.sizes[-2] == 1:
            return None
        queries = given.steps[-2], given.sizes[-2]
    else:
        queries = _rows_of(track.product, axes)
        if given is not None and given.sizes[-1:] == axes.sizes[-1:]:
            size = max(given.sizes[-2:-1], default=1)
            if size == 1 < len(given.sizes) - 2:
                return None  # one query, of heads that share a key
            if 1 < size < queries[1] and queries not in pairs:
                queries = (given.steps[-2], size)  # heads are rows of the product, too
    return pairs.index(queries) if queries in pairs[:-2] and pairs[-2] != queries else None


def grouped(track: Track, shaped: Tensor) -> Tensor:
    """Split an axis of heads into groups that share a key, whose heads are rows of the product."""
    axes = None if track.axes is None else track.axes.of_view(shaped)
    if track.product is None or axes is None or axes.sizes[-2] > 1:
        return shaped
    row, rows = _rows_of(track.product, axes)
    for axis, (size, step) in enumerate(zip(axes.sizes[:-2], axes.steps, strict=False)):
        count = rows * row // max(step, 1)
        if 1 < count < size and size % count == 0:
            return cast(Tensor, shaped.unflatten(axis, (size // count, count)))
    return shaped


def _keys_are_columns(product: Product, axes: Axes) -> bool:
    """Return True if the keys of weights (..., keys) are the columns of their product."""
    if axes.sizes[-1] > 1:
        return axes.steps[-1] < product.steps[1]
    _, rows, columns = product.sizes
    # One key may be a slice of several.
    return rows > 1 or columns == 1 or axes.sizes[-2] != columns


def _rows_of(product: Product, axes: Axes) -> tuple[int, int]:
    """Return the step and the number of queries of a product, of which weights (..., keys) are."""
    axis = 1 if _keys_are_columns(product, axes) else 2
    return product.steps[axis], product.sizes[axis]


def _views(track: Track, side: Tensor) -> Iterator[Tensor]:
    """Yield the views of an operand (batch, rows, keys) that the model took, with keys last.

    Views with more axes than the model computed, as einsum makes, have as many axes of size 1.
    """
    ndim = len(track.shape)
    for sizes, strides, offset in track.shapes:
        axes = [*zip(sizes, strides, strict=False)]
        if len(sizes) > ndim:
            axes = [axis for axis in axes if axis[0] > 1]
            for axis in range(1, ndim + 1):  # keys, queries, and those before them
                if track.shape[-axis] == 1 and (axis < 3 or axis > len(axes)):
                    axes.insert(len(axes) + 1 - axis, (1, 1))
            if track.shape[0] == 1 < axes[0][0] and track.shape[-1] == side.shape[-1]:
                axes.insert(0, (1, 1))
        sizes = tuple(size for size, _ in axes)
        if len(sizes) < 2 or sizes[-1] != side.shape[-1] or math.prod(sizes) != side.numel():
            continue
        view = side.as_strided(sizes, tuple(stride for _, stride in axes), offset)
        if _has_elements_of(view, side):
            yield view


def _has_elements_of(view: Tensor, side: Tensor) -> bool:
    """Return True if a view of the same storage has the elements of ``side`` in the same order."""
    try:
        same = view.view(side.shape)
    except RuntimeError:
        return False
    steps = zip(side.shape, same.stride(), side.stride(), strict=True)
    return same.storage_offset() == side.storage_offset() and all(
        size == 1 or first == second for size, first, second in steps
    )


def shaped_value(value: Tensor, leading: torch.Size) -> Tensor:
    """Return the value (..., keys, head_dim) on the leading axes of the weights.

    Axes of heads that share it, because they are rows of one product, have size 1.
    """
    value, batch = value.detach(), math.prod(value.shape[:-2])
    if math.prod(leading) == batch:
        return value.reshape(*leading, *value.shape[-2:])
    for axis in reversed(range(len(leading))):
        if math.prod(leading[:axis]) == batch:
            return value.reshape(*leading[:axis], *(1,) * (len(leading) - axis), *value.shape[-2:])
    return value


def evidence_of(track: Track, shaped: Tensor, weights: Tensor) -> Evidence | None:
    """Return what the weights may follow from, on their own axes."""
    softmax, product = track.softmax, track.product
    axes = None if track.axes is None else track.axes.of_view(shaped)
    if softmax is None or product is None or axes is None or softmax.product is not product:
        return None
    if softmax.scores is None or softmax.axes is None:
        return None
    factors = query_and_key(product, axes)
    scores = softmax.axes.arranged(softmax.scores, axes)
    if factors is None or scores is None or scores.shape[-2:] != shaped.shape[-2:]:
        return None
    scores = scores.expand(shaped.shape)
    sink = given = None
    length = softmax.axes.sizes[softmax.dim]
    if length == shaped.shape[-1] + 1:
        sink = column_beside(softmax, axes)
        if softmax.steps.sink is not None:
            column, its_axes = softmax.steps.sink
            given = its_axes.arranged(column, replace(axes, sizes=(*axes.sizes[:-1], 1)))
    if length not in (shaped.shape[-1], shaped.shape[-1] + 1) or (
        length > shaped.shape[-1] and sink is None
    ):
        return None
    terms = [term.axes.arranged(term.numbers, axes) for term in softmax.steps.terms]
    arranged = [numbers for numbers in terms if numbers is not None]
    return Evidence(
        weights,
        track.rounding,
        scores,
        sink,
        given,
        *factors,
        replace(softmax.steps, is_learned=track.steps.is_learned),
        tuple(arranged) if len(arranged) == len(terms) else None,
    )


def query_and_key(product: Product, axes: Axes) -> tuple[Tensor, Tensor] | None:
    """Return query (..., q_len, head_dim) and key (..., kv_len, head_dim) on the weights' axes."""
    is_column = _keys_are_columns(product, axes)
    query, key = (product.left, product.right) if is_column else (product.right, product.left)
    query, key = (
        _operand(product, axes, query, omitted=-1),
        _operand(product, axes, key, omitted=-2),
    )
    return None if query is None or key is None else (query, key)


def _operand(product: Product, axes: Axes, tensor: Tensor, *, omitted: int) -> Tensor | None:
    """Return a factor, (..., tokens, head_dim), as a view where possible."""
    is_left = tensor is product.left
    kept = [axis for axis in range(len(axes.sizes)) if axis != len(axes.sizes) + omitted]
    sizes, steps = ([of[axis] for axis in kept] for of in (axes.sizes, axes.steps))
    for operand in (tensor, tensor.contiguous()):
        batch, tokens, depth = operand.stride()
        strides = (batch, tokens, 0) if is_left else (batch, 0, tokens)
        basis = zip(product.sizes, product.steps, strides, strict=True)
        laid = translated(basis, sizes, steps, axes.first)
        if laid is not None:
            offset = int(operand.storage_offset()) + laid[1]
            return operand.as_strided((*sizes, operand.shape[-1]), (*laid[0], depth), offset)
    return None


def column_beside(softmax: Softmax, axes: Axes) -> Tensor | None:
    """Return the one column of a softmax's input that the weights lack, (..., q_len, 1)."""
    scores, of_scores = cast(Tensor, softmax.scores), cast(Axes, softmax.axes)
    keys, step = axes.sizes[-1], axes.steps[-1]
    is_before = (axes.first - of_scores.first) // step % max(keys, 2) == 1
    column = scores.narrow(softmax.dim, 0 if is_before else scores.shape[softmax.dim] - 1, 1)
    sizes = tuple(1 if axis == softmax.dim else n for axis, n in enumerate(of_scores.sizes))
    beside = replace(of_scores, sizes=sizes)
    final = replace(axes, sizes=(*axes.sizes[:-1], 1), first=axes.first - step * is_before)
    return beside.arranged(column, final)


def with_column(
    operation: Operation, track: Track, source: Tensor, output: Tensor
) -> tuple[Axes, tuple[Tensor, Axes]] | None:
    """Return the axes of scores beside which one column was put, and that column with its axes.

    The result is None for any other operation.
    """
    tensors = list(tensors_in(operation.args[:1]))
    axes = None if track.axes is None else track.axes.of_view(source)
    if axes is None or any(each.ndim != output.ndim for each in (source, *tensors)):
        return None
    grown = [axis for axis in range(output.ndim) if output.shape[axis] != source.shape[axis]]
    if len(grown) != 1 or output.shape[grown[0]] != source.shape[grown[0]] + 1:
        return None
    dim = grown[0]
    if operation.func is torch.ops.aten.constant_pad_nd.default and dim == output.ndim - 1:
        is_before = bool(operation.args[1][0])
        column = output.narrow(dim, 0 if is_before else source.shape[dim], 1)
    elif len(tensors) == 2:
        is_before = tensors[1] is source
        column = tensors[0 if is_before else 1]
    else:
        return None
    beside = replace(axes, sizes=tuple(column.shape))
    first = axes.first - (axes.steps[dim] if is_before else 0)
    return Axes.of(output, axes.steps, first), (column, beside)


def axes_of_copy(axes: Axes, output: Tensor) -> Axes | None:
    """Return the axes of a contiguous copy of a tensor in any shape, with the tensor's own axes."""
    if math.prod(axes.sizes) != output.numel() or output.layout != torch.strided:
        return None
    if not output.is_contiguous():
        return None
    offset = int(output.storage_offset())
    return Axes(axes.sizes, contiguous(axes.sizes), offset, axes.steps, axes.first)


def geometry(tensor: Tensor) -> Geometry:
    """Return the sizes, strides and offset of a tensor; no strides if it has none."""
    if tensor.layout != torch.strided:
        return tuple(tensor.shape), (), 0
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def rounding_of(tensor: Tensor) -> float:
    """Return the relative rounding error of a tensor's dtype; 0 for whole numbers and 8 bits.

    Weights of 8 bits are other weights than those of the softmax.
    """
    is_rounded = tensor.is_floating_point() and tensor.element_size() > 1
    return torch.finfo(tensor.dtype).eps if is_rounded else 0.0
