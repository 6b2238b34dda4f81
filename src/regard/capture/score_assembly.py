"""Scores that were put together of parts: rows in a loop, cells, heads, blocks, as one product.

Each part comes from a product of its own. Where the parts lie in the whole tells which of its axes
are queries, which are keys, and which are both; their queries and keys, put together likewise, have
the whole as their product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes, Numbers, contiguous, translated
from regard.capture.product_axes import Untold
from regard.capture.score_chain import LOW, Fill, Plus, Step, Tanh, Times, Zeros

__all__ = ["Piece", "assembled"]

_Kind = TypeVar("_Kind", bound=Step)

_NOT_WHOLE = "is taken of scores that were put together of parts that make no whole."


class Piece(NamedTuple):
    """Scores in a part of a tensor.

    Attributes:
        product: that they come from.
        steps: what was done to it.
        axes: of the part, in the storage and in the product.
    """

    product: Product
    steps: tuple[Step, ...]
    axes: Axes


@dataclass(eq=False, slots=True)
class _Laid:
    """A part as it lies in the whole, along all axes of the whole.

    Attributes:
        piece: the part.
        starts: its first place along each axis.
        axes: its sizes, and its places in its own product.
        vectors: of query and key, (sizes..., depth); an axis along which they stay has stride 0.
    """

    piece: Piece
    starts: Numbers
    axes: Axes
    vectors: tuple[Tensor, Tensor]

    def box(self, along: Sequence[bool]) -> tuple[slice, ...]:
        """Where it lies in what has size 1 along the other axes."""
        sides = zip(self.starts, self.axes.sizes, along, strict=True)
        return tuple(slice(start, start + n) if own else slice(1) for start, n, own in sides)


def assembled(pieces: Sequence[Piece], whole: Tensor) -> Piece:
    """The scores of a tensor of which all pieces are parts, as one product and its steps.

    Raises:
        Untold: the pieces overlap, do not fit, or leave out what is no mask.

    Example:
        >>> import torch
        >>> from regard.capture.score_assembly import Piece, assembled
        >>> from regard.capture.element_axes import Axes
        >>> from regard.capture.contractions import contraction, matmul_labels
        >>> query, key, scores = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(3, 5)
        >>> def row(i):
        ...     product, places = contraction(key, query[i], matmul_labels(2, 1))
        ...     return Piece(product, (), Axes.of(scores[i], places))
        >>> found = assembled([row(i) for i in range(3)], scores)
        >>> torch.equal(found.product.left, key), torch.equal(found.product.right, query)
        (True, True)
    """
    laid = [_laid(piece, whole) for piece in pieces]
    of_left, of_right = (_varies(laid, whole, side) for side in (0, 1))
    for axis in range(whole.ndim):
        if whole.shape[axis] > 1 and not (of_left[axis] or of_right[axis]):
            raise Untold(_NOT_WHOLE)
    left, right = _gathered(laid, whole, of_left, 0), _gathered(laid, whole, of_right, 1)
    kinds = list(zip(of_left, of_right, strict=True))
    batch, rows, columns = (
        [axis for axis, kind in enumerate(kinds) if kind == own]
        for own in ((True, True), (True, False), (False, True))
    )
    product = Product(
        left.permute(*batch, *rows, *_rest(batch + rows, left)).flatten(len(batch + rows)),
        right.permute(*batch, *columns, *_rest(batch + columns, right)).flatten(
            len(batch + columns)
        ),
        *(tuple(whole.shape[axis] for axis in axes) for axes in (batch, rows, columns)),
        modules=pieces[0].product.modules,
    )
    places = dict(zip((*batch, *rows, *columns), product.places, strict=True))
    axes = Axes.of(whole, tuple(places.get(axis, 0) for axis in range(whole.ndim)))
    return Piece(product, _joined_steps(laid, whole, axes), axes)


def _rest(kept: list[int], tensor: Tensor) -> list[int]:
    """The other axes of a tensor: of size 1, and the depth."""
    return [axis for axis in range(tensor.ndim) if axis not in kept]


def _laid(piece: Piece, whole: Tensor) -> _Laid:
    """A piece on the axes of the whole."""
    places, part = contiguous(whole.shape), piece.axes
    basis = zip(whole.shape, whole.stride(), places, strict=True)
    offset = part.offset - int(whole.storage_offset())
    found = translated(basis, part.sizes, part.strides, offset)
    if found is None:
        raise Untold(_NOT_WHOLE)
    rest, starts = found[1], list[int]()
    for place in places:
        start, rest = divmod(rest, place)
        starts.append(start)
    sizes, own = [1] * whole.ndim, [0] * whole.ndim
    for size, step, place in zip(part.sizes, found[0], part.places, strict=True):
        if size == 1:
            continue
        at = [a for a, n in enumerate(whole.shape) if n > 1 and places[a] == step]
        if not at or sizes[at[0]] > 1:
            raise Untold(_NOT_WHOLE)
        sizes[at[0]], own[at[0]] = size, place
    axes = Axes(tuple(sizes), (0,) * whole.ndim, 0, tuple(own), part.start)
    return _Laid(piece, tuple(starts), axes, _vectors(piece.product, axes))


def _vectors(product: Product, axes: Axes) -> tuple[Tensor, Tensor]:
    """Query and key of each element of a part of a product; views."""
    batch, ahead, behind = len(product.batch), len(product.rows), len(product.columns)
    found: list[Tensor] = []
    for tensor, before, after in ((product.left, 0, behind), (product.right, ahead, 0)):
        *strides, depth = tensor.stride()
        own = (*strides[:batch], *(0,) * before, *strides[batch:], *(0,) * after)
        basis = zip(product.sizes, product.places, own, strict=True)
        steps = translated(basis, axes.sizes, axes.places, axes.start)
        if steps is None:
            raise Untold(_NOT_WHOLE)
        offset = int(tensor.storage_offset()) + steps[1]
        size = (*axes.sizes, tensor.shape[-1])
        found.append(tensor.as_strided(size, (*steps[0], depth), offset))
    return found[0], found[1]


def _varies(laid: Sequence[_Laid], whole: Tensor, side: int) -> list[bool]:
    """Along which axes of the whole the queries (or the keys) differ."""
    found: list[bool] = []
    for axis in range(whole.ndim):
        along = [each.vectors[side].stride(axis) for each in laid if each.axes.sizes[axis] > 1]
        found.append(any(along) or _differ_along(laid, axis, side))
        if found[-1] and not all(along):
            raise Untold(_NOT_WHOLE)
    return found


def _differ_along(laid: Sequence[_Laid], axis: int, side: int) -> bool:
    """Whether parts that lie side by side along an axis have other first vectors."""
    before: dict[Numbers, Tensor] = {}
    for each in laid:
        beside = (*each.starts[:axis], *each.starts[axis + 1 :])
        vector = each.vectors[side][(0,) * (each.vectors[side].ndim - 1)]
        other = before.setdefault(beside, vector)
        if other.data_ptr() != vector.data_ptr() and not torch.equal(other, vector):
            return True
    return False


def _gathered(laid: Sequence[_Laid], whole: Tensor, along: list[bool], side: int) -> Tensor:
    """The queries (or the keys) of all parts, (sizes..., depth), size 1 where they stay."""
    first = laid[0].vectors[side]
    sizes = [n if own else 1 for n, own in zip(whole.shape, along, strict=True)]
    vectors = first.new_zeros(*sizes, first.shape[-1])
    known = torch.zeros(sizes, dtype=torch.bool, device=first.device)
    met: set[tuple[object, ...]] = set()
    for each in laid:
        own, box = each.vectors[side], each.box(along)
        here = (own.data_ptr(), own.stride(), own.shape, str(box))
        if here in met:
            continue
        met.add(here)
        if own.shape[-1] != first.shape[-1] or own.dtype != first.dtype:
            raise Untold(_NOT_WHOLE)
        own = own[tuple(slice(None) if varies else slice(1) for varies in along)]
        if bool((known[box] & (vectors[box] != own).any(-1)).any()):
            raise Untold(_NOT_WHOLE)
        vectors[box], known[box] = own, True
    if not bool(known.all()):
        raise Untold(_NOT_WHOLE)
    return vectors


def _joined_steps(laid: Sequence[_Laid], whole: Tensor, axes: Axes) -> tuple[Step, ...]:
    """What was done to all parts alike, and what stands where there is none."""
    written = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
    for each in laid:
        box = each.box([True] * whole.ndim)
        if bool(written[box].any()):
            raise Untold(_NOT_WHOLE)
        written[box] = True
    heads = [_before_fills(each.piece.steps) for each in laid]
    if any(len(head) != len(heads[0]) for head in heads):
        raise Untold(_NOT_WHOLE)
    steps = [_joined_step(laid, list(at), whole, axes) for at in zip(*heads, strict=True)]
    fills = [each.piece.steps[len(head) :] for each, head in zip(laid, heads, strict=True)]
    if any(fills):
        steps.append(_joined_fills(laid, fills, whole, axes))
    if not bool(written.all()):
        others = whole[~written]
        number = float(others[0])
        if bool((others != number).any()) or not (number <= LOW or number == 0):
            raise Untold(_NOT_WHOLE)
        beside = Zeros(written, axes) if number == 0 else Fill(written, axes, number, inverted=True)
        steps.append(beside)
    return tuple(steps)


def _before_fills(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps up to the fills at their end, of which one row may have more than another."""
    length = len(steps)
    while length and isinstance(steps[length - 1], Fill):
        length -= 1
    return steps[:length]


def _joined_fills(
    laid: Sequence[_Laid], fills: Sequence[Sequence[Step]], whole: Tensor, axes: Axes
) -> Step:
    """Fills of one number, some in each part, as a fill of the whole."""
    where = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
    values: set[float] = set()
    for each, own in zip(laid, fills, strict=True):
        for step in _all(own, Fill):
            there = _arranged(step.where, step.axes, each, whole) != 0
            where[each.box([True] * whole.ndim)] |= ~there if step.inverted else there
            values.add(step.value)
    if len(values) > 1:
        raise Untold(_NOT_WHOLE)
    return Fill(where, axes, values.pop())


def _joined_step(laid: Sequence[_Laid], steps: Sequence[Step], whole: Tensor, axes: Axes) -> Step:
    """One step of all parts, of the same kind, as a step of the whole."""
    first = steps[0]
    if any(type(step) is not type(first) for step in steps):
        raise Untold(_NOT_WHOLE)
    match first:
        case Tanh():
            return Tanh(axes)
        case Times(_, _, divides):
            numbers = {(_number(step.factor), step.divides) for step in _all(steps, Times)}
            if len(numbers) > 1 or None in next(iter(numbers)):
                raise Untold(_NOT_WHOLE)
            return Times(first.factor, axes, divides)
        case Plus():
            added = torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
            for each, step in zip(laid, _all(steps, Plus), strict=True):
                numbers = _arranged(step.numbers, step.axes, each, whole)
                added[each.box([True] * whole.ndim)] = step.factor * numbers
            return Plus(added, axes)
        case Fill():
            return _joined_fills(laid, [[step] for step in steps], whole, axes)
        case _:
            raise Untold(_NOT_WHOLE)


def _all(steps: Sequence[Step], kind: type[_Kind]) -> list[_Kind]:
    return [step for step in steps if isinstance(step, kind)]


def _number(factor: Tensor | float) -> float | None:
    if not isinstance(factor, Tensor):
        return float(factor)
    return float(factor) if factor.numel() == 1 else None


def _arranged(numbers: Tensor | float, axes: Axes, each: _Laid, whole: Tensor) -> Tensor:
    """The operand of a part's step, on the axes of the whole."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, device=whole.device)
    view = axes.arranged(tensor, replace(each.axes, strides=(0,) * whole.ndim))
    if view is None:
        raise Untold(_NOT_WHOLE)
    return view
