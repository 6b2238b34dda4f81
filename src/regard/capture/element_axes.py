"""The positions of a tensor's elements in the product that they came from, from strides alone.

The elements of a product are numbered in the order batch, row, column. A model may view, permute
and copy the product. One step along an axis of the result still moves by a fixed number of elements
in that order. So the axes of any view follow from its strides, without reading its elements.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Numbers: TypeAlias = tuple[int, ...]


def contiguous(sizes: Sequence[int]) -> Numbers:
    """Return the strides of a contiguous tensor of these sizes."""
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a tensor, with their strides in its storage and in the product.

    Attributes:
        sizes: the size of each axis.
        strides: the stride of each axis in the storage.
        offset: the position of the first element in the storage.
        steps: the stride of each axis in the product.
        first: the index of the first element in the product.
    """

    sizes: Numbers
    strides: Numbers
    offset: int
    steps: Numbers
    first: int = 0

    @classmethod
    def of(cls, tensor: Tensor, steps: Numbers, first: int = 0) -> "Axes":
        """Return the axes of a tensor whose strides in the product are known."""
        offset = int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset, steps, first)

    def of_view(self, view: Tensor) -> "Axes | None":
        """Return the axes of another view of the same storage.

        The result is None if the view has elements that the tensor lacks.
        """
        strides, offset = view.stride(), int(view.storage_offset())
        if strides == self.strides and offset == self.offset and view.shape == self.sizes:
            return self
        basis = zip(self.sizes, self.strides, self.steps, strict=True)
        laid = translated(basis, view.shape, strides, offset - self.offset)
        return None if laid is None else Axes.of(view, laid[0], self.first + laid[1])

    def moved(self, result: Tensor) -> "Axes | None":
        """Return the axes of the result of an elementwise operation on the tensor.

        The result is None if the operation broadcast the tensor to a larger shape.
        """
        new = result.ndim - len(self.sizes)
        if new < 0 or tuple(result.shape) != (*(1,) * new, *self.sizes):
            return None
        return Axes.of(result, (*(0,) * new, *self.steps), self.first)

    def arranged(self, operand: Tensor, final: "Axes") -> Tensor | None:
        """Return a view of a tensor that broadcasts to ``sizes``, on the axes of ``final``.

        Axes along which it is constant have size 1. The result is None if there is no such view.
        ``final`` must come from the same product.
        """
        sizes = zip(operand.shape[::-1], self.sizes[::-1], strict=False)
        if operand.ndim > len(self.sizes) or any(size not in (1, full) for size, full in sizes):
            return None
        spread = operand.expand(self.sizes)
        basis = zip(self.sizes, self.steps, spread.stride(), strict=True)
        laid = translated(basis, final.sizes, final.steps, final.first - self.first)
        if laid is None:
            return None
        strides, offset = laid
        sizes = [size if step else 1 for size, step in zip(final.sizes, strides, strict=True)]
        return spread.as_strided(sizes, strides, spread.storage_offset() + offset)


def translated(
    basis: Iterable[tuple[int, int, int]],
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int,
) -> tuple[Numbers, int] | None:
    """Translate the strides and the offset of a view from one order of the elements to another.

    Each axis of ``basis`` has a size, a stride in the first order and a stride in the second order.
    ``strides`` and ``offset`` are those of the view in the first order; strides of axes of size 1
    are ignored. The result is None if the view leaves the elements or has no strides in the
    second order.
    """
    axes = _joined(basis)
    reach = _counts(axes, offset)
    if reach is None:
        return None
    first = sum(count * to for count, (_, _, to) in zip(reach, axes, strict=True))
    laid: list[int] = []
    for size, stride in zip(sizes, strides, strict=True):
        counts = _counts(axes, stride if size > 1 else 0)
        if counts is None:
            return None
        reach = [far + count * (size - 1) for far, count in zip(reach, counts, strict=True)]
        laid.append(sum(count * to for count, (_, _, to) in zip(counts, axes, strict=True)))
    if any(far >= size for far, (size, _, _) in zip(reach, axes, strict=True)):
        return None
    return tuple(laid), first


def _joined(basis: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sort axes by falling stride, and merge neighbours that are contiguous in both orders."""
    kept = sorted((axis for axis in basis if axis[0] > 1), key=lambda axis: -axis[1])
    axes: list[tuple[int, int, int]] = []
    for size, stride, to in kept:
        if axes and axes[-1][1:] == (size * stride, size * to):
            axes[-1] = (axes[-1][0] * size, stride, to)
        else:
            axes.append((size, stride, to))
    return axes


def _counts(axes: list[tuple[int, int, int]], distance: int) -> list[int] | None:
    """Return the number of steps along each axis that add up to a distance; None if none do."""
    counts: list[int] = []
    for _, stride, _ in axes:
        count, distance = divmod(distance, stride) if stride else (0, distance)
        counts.append(count)
    return None if distance or any(count < 0 for count in counts) else counts
