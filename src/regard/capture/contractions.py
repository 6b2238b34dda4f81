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
        gathered: True if an index chose the rows of a factor.
        parameter: the factor that is a parameter; None if both are activations.
    """

    left: Tensor
    right: Tensor
    modules: tuple[str, ...]
    line: str
    gathered: bool
    parameter: Tensor | None = None

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


def broadcast_product(first: Tensor, second: Tensor) -> Written | None:
    """Return the product that einsum computes with ``mul`` if the summed axis has size 1.

    An axis that only the first tensor has is a row, one that only the second has is a column. The
    factors are copies where no view has these axes. The result is None for other shapes.
    """
    if first.ndim != second.ndim:
        return None
    sizes = [*zip(first.shape, second.shape, strict=True)]
    rows = [axis for axis, (one, other) in enumerate(sizes) if one > other]
    columns = [axis for axis, (one, other) in enumerate(sizes) if one < other]
    batch = [axis for axis, (one, other) in enumerate(sizes) if one == other]
    order = (*batch, *rows, *columns)
    every = dict(zip(order, contiguous([max(sizes[axis]) for axis in order]), strict=True))
    count = prod(sizes[axis][0] for axis in batch)
    left = first.permute(order).reshape(count, -1, 1)
    right = second.permute(order).reshape(count, 1, -1)
    return Written(left, right, tuple(every[axis] for axis in range(first.ndim)))


def weighted_sum(weights: Tensor, value: Tensor, axis: int, output: Tensor) -> Written | None:
    """Return the product of weights and value that ``(weights * value).sum(axis)`` computes.

    The summed axis are the keys. An axis that only the weights have is a row, one that only the
    value has is a column. The result is None if the axis is no axis of both, if no view of the
    weights has these axes, or if the product is not ``output``, because one of them was written to.
    """
    ndim = max(weights.ndim, value.ndim)
    first, second = (each[(None,) * (ndim - each.ndim)] for each in (weights, value))
    sizes = [*zip(first.shape, second.shape, strict=True)]
    keys = axis % ndim
    if sizes[keys][0] != sizes[keys][1] or sizes[keys][0] == 1:
        return None
    rest = [(axis, *size) for axis, size in enumerate(sizes) if axis != keys]
    batch = [axis for axis, one, other in rest if one == other]
    rows = [axis for axis, one, other in rest if one > other]
    columns = [axis for axis, one, other in rest if one < other]
    count, depth = prod(sizes[axis][0] for axis in batch), sizes[keys][0]
    left = first.permute(*batch, *rows, keys, *columns).reshape(count, -1, depth)
    right = second.permute(*batch, keys, *columns, *rows).reshape(count, depth, -1)
    if left.data_ptr() != first.data_ptr():
        return None
    order = [axis - (axis > keys) for axis in (*batch, *rows, *columns)]
    given = output.reshape([max(one, other) for _, one, other in rest]).permute(order)
    used = (left @ right).to(output.dtype).reshape(given.shape)
    rounding = 16 * finfo(output.dtype).eps * max(1.0, float(right.abs().max()))
    if not allclose(used, given, rtol=rounding, atol=rounding, equal_nan=True):
        return None
    return Written(left, right, ())
