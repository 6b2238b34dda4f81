"""Whether weights reach the value as the softmax gave them."""

import torch
from torch import Tensor

from regard.tracing import Operation

__all__ = ["CHANCE", "are_changed", "are_changed_in_place", "fits", "is_gated", "sums_to_one"]

_ALIKE = 0.01  # half precision rounds what dropout scaled up


def is_gated(weights: Tensor, used: Tensor, *, dropped: bool = False) -> bool:
    """Whether weights were changed by something that is no part of attention.

    Dropout, which makes some 0 and scales the others up, is none; nor are rows that were made 0 as
    a whole, which have no key to attend to.

    Args:
        weights: as the softmax gave them, (..., q_len, kv_len).
        used: the same shape, after one more operation.
        dropped: whether chance had a part in it.

    Example:
        >>> import torch
        >>> from regard.capture.gates import is_gated
        >>> even = torch.full((3, 3), 1 / 3)
        >>> used = even * torch.tensor([0.0, 2.0, 2.0])
        >>> is_gated(even, even.tril()), is_gated(even, used), is_gated(even, used, dropped=True)
        (True, True, False)
    """
    rounding = 2 * torch.finfo(used.dtype).eps
    same = torch.isclose(used, weights, rtol=rounding, atol=0, equal_nan=True)
    differ = ~same & ~(used == 0).all(-1, keepdim=True)
    if not bool(differ.any()):
        return False
    if not dropped:
        return True
    factors = (used / weights)[differ & (used != 0)]
    if not factors.numel():
        return True
    largest = factors.max()
    return not bool((largest > 1 + _ALIKE) & (factors > (1 - _ALIKE) * largest).all())


def are_changed(operation: Operation, weights: Tensor, used: Tensor, *, dropped: bool) -> bool:
    """Whether an operation that gave ``used`` has changed weights.

    Args:
        operation: what has run.
        weights: what it was given.
        used: what it gave: element by element, repeated where the shape is larger.
        dropped: whether one of its arguments was drawn by chance.
    """
    if operation.func in _DROPOUTS:
        return False
    if fits(weights, used):
        return is_gated(weights.to(used.dtype).expand_as(used), used, dropped=dropped)
    same = weights.numel() == used.numel()
    return not (same and torch.equal(weights.to(used.dtype).flatten(), used.flatten()))


def are_changed_in_place(
    operation: Operation, whole: Tensor, dim: int | None, *, dropped: bool
) -> bool:
    """Whether an operation in place has changed weights; what they were nobody knows any more.

    Args:
        operation: what has run.
        whole: the weights, after it.
        dim: the axis along which they summed to 1; None where there is none.
        dropped: whether one of its arguments was drawn by chance.
    """
    if operation.func in _DROPOUTS:
        return False
    if operation.func in _PRODUCTS:
        factor = operation.args[1]
        if not isinstance(factor, Tensor):
            factor = torch.tensor(float(factor))
        factor = factor.to(whole.dtype).expand(operation.args[0].shape)
        if not is_gated(torch.ones_like(factor), factor, dropped=dropped):
            return False
    return operation.func is aten.copy_.default or dim is None or not sums_to_one(whole, dim)


def sums_to_one(numbers: Tensor, dim: int) -> bool:
    """Whether all rows sum to 1, but for those of zeros or NaN, which have no key to attend to.

    Args:
        numbers: not negative.
        dim: the axis of the rows' elements.

    Example:
        >>> import torch
        >>> from regard.capture.gates import sums_to_one
        >>> even = torch.full((3, 4), 0.25)
        >>> sums_to_one(even, -1), sums_to_one(even, 0)
        (True, False)
    """
    wide = numbers.dtype if numbers.dtype.itemsize > 2 else torch.float32
    within = _NEAR if numbers.dtype.itemsize > 2 else _NEAR_IN_HALF
    first = numbers
    for axis in reversed(range(numbers.ndim)):
        if axis != dim % numbers.ndim:
            first = first.narrow(axis, numbers.shape[axis] - 1, 1)
    for part in (first, numbers):  # the last row alone tells most that do not
        sums = part.sum(dim, dtype=wide)
        real = (sums != 0) & ~sums.isnan()
        if bool((real & ((sums - 1).abs() > within)).any()):
            return False
    return bool(real.any())


def fits(weights: Tensor, used: Tensor) -> bool:
    """Whether an operation on weights, element by element, could have given a tensor."""
    if not (weights.is_floating_point() and used.is_floating_point()):
        return False
    new = used.ndim - weights.ndim
    pairs = zip(weights.shape, used.shape[max(new, 0) :], strict=False)
    return new >= 0 and all(size in (1, other) for size, other in pairs)


_NEAR = 1e-4  # what a logarithm of the sum rounds to
_NEAR_IN_HALF = 0.05

aten = torch.ops.aten
_DROPOUTS = (
    *(aten.dropout.default, aten.dropout_.default, aten.native_dropout.default),
    *(aten.feature_dropout.default, aten.feature_dropout_.default),
)
_PRODUCTS = (aten.mul_.Tensor, aten.multiply_.Tensor)
CHANCE = (aten.bernoulli_.float, aten.bernoulli.default, aten.bernoulli.p)
"""What draws the numbers that dropout multiplies with."""
