"""Products of two tensors over one axis, as matmul, linear and einsum compute them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, allclose, finfo

from regard.capture.element_axes import Numbers, contiguous
from regard.tracing.operations import ADDED_PRODUCTS


@dataclass(eq=False, slots=True)
class Product:
    """A product of two activations over their last axis.

    Attributes:
        left: (batch, rows, depth).
        right: (batch, columns, depth).
        modules: the names of the modules that were running when the product was computed.
        line: its ``file:line``.
        call: the Python instruction that ran it.
        gathered: True if an index chose the rows of a factor.
        parameter: the factor that is a parameter; None if both are activations.
        sources: the model's own tensors, if they have a graph; a checkpoint does not hold them.
    """

    left: Tensor
    right: Tensor
    modules: tuple[str, ...]
    line: str
    call: tuple[int, int]
    gathered: bool
    parameter: Tensor | None = None
    sources: tuple[Tensor, ...] = ()

    @property
    def sizes(self) -> Numbers:
        """Return the sizes (batch, rows, columns)."""
        return (*self.left.shape[:2], self.right.shape[1])

    @property
    def steps(self) -> Numbers:
        """Return the strides of the contiguous product."""
        return contiguous(self.sizes)


@dataclass(frozen=True, slots=True)
class Written:
    """A product as an operation computed it: alpha · left @ right + beta · added.

    Attributes:
        left: (batch, rows, depth).
        right: (batch, depth, columns).
        steps: the stride in the contiguous (batch, rows, columns) of each axis of the output.
    """

    left: Tensor
    right: Tensor
    steps: Numbers
    added: Tensor | None = None
    beta: float = 0.0
    alpha: float = 1.0

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return each factor, (batch, rows, depth), with the other, (batch, depth, columns)."""
        return (self.left, self.right), (self.right.mT, self.left.mT)


def written(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Written:
    """Return the product that one of ``PRODUCTS`` computed, given its arguments."""
    added: Tensor | None = None
    beta, alpha = 0.0, 1.0
    if func in ADDED_PRODUCTS:
        added, *args = args[:3]  # pyright: ignore[reportAssignmentType]
        beta, alpha = (float(kwargs.get(name, 1)) for name in ("beta", "alpha"))
    left, right = args[:2]
    if right.ndim == 1:  # of a matrix and a vector, the vector is the one row
        left, right = right, left.mT if left.ndim > 1 else left
    has_axis = left.ndim == 3, left.ndim > 1, right.ndim > 1
    left = left[(None,) * (3 - left.ndim)]
    right = right[None, :, None] if right.ndim == 1 else right[(None,) * (3 - right.ndim)]
    every = contiguous((left.shape[0], left.shape[1], right.shape[2]))
    steps = tuple(step for step, is_there in zip(every, has_axis, strict=True) if is_there)
    return Written(left, right, steps, added, beta, alpha)


def broadcast_product(first: Tensor, second: Tensor, summed: int | None = None) -> Written | None:
    """Return the product that ``(first * second).sum(summed)`` computes by broadcasting.

    An axis that only the first tensor has is a row, one that only the second has is a column. The
    axis ``summed`` is the depth; None if nothing is summed, as where einsum sums an axis of size 1.
    The factors are copies where no view has these axes. The result is None if ``summed`` is no axis
    of both.
    """
    ndim = max(first.ndim, second.ndim)
    first, second = (each[(None,) * (ndim - each.ndim)] for each in (first, second))
    sizes = [*zip(first.shape, second.shape, strict=True)]
    depth = [] if summed is None else [summed % ndim]
    if any(sizes[axis][0] != sizes[axis][1] or sizes[axis][0] == 1 for axis in depth):
        return None
    rest = [axis for axis in range(ndim) if axis not in depth]
    batch = [axis for axis in rest if sizes[axis][0] == sizes[axis][1]]
    rows = [axis for axis in rest if sizes[axis][0] > sizes[axis][1]]
    columns = [axis for axis in rest if sizes[axis][0] < sizes[axis][1]]
    count = prod(sizes[axis][0] for axis in batch)
    length = prod(sizes[axis][0] for axis in depth)
    left = first.permute(*batch, *rows, *depth, *columns).reshape(count, -1, length)
    right = second.permute(*batch, *depth, *columns, *rows).reshape(count, length, -1)
    order = (*batch, *rows, *columns)
    every = dict(zip(order, contiguous([max(sizes[axis]) for axis in order]), strict=True))
    return Written(left, right, tuple(every[axis] for axis in rest))


def weighted_sum(weights: Tensor, value: Tensor, axis: int, output: Tensor) -> Written | None:
    """Return the product of weights and value that ``(weights * value).sum(axis)`` computes.

    The result is None if no view of the weights has its axes, or if the product is not ``output``,
    because one of them was written to.
    """
    product = broadcast_product(weights, value, axis)
    if product is None or product.left.data_ptr() != weights.data_ptr():
        return None
    sizes = list(output.shape)
    if len(sizes) > len(product.steps):  # keepdim
        del sizes[axis % len(sizes)]
    used = (product.left @ product.right).to(output.dtype).as_strided(sizes, product.steps)
    rounding = 16 * finfo(output.dtype).eps * max(1.0, float(product.right.abs().max()))
    given = output.reshape(sizes)
    is_same = allclose(used, given, rtol=rounding, atol=rounding, equal_nan=True)
    return product if is_same else None
