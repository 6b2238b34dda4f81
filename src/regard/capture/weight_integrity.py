"""Whether weights reach the value as the softmax gave them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.capture.arithmetic import MULTIPLICATIONS, QUOTIENTS
from regard.capture.fills import ASSIGNMENTS
from regard.tracing.tracer import Operation

__all__ = [
    "CHANCE",
    "Fate",
    "fate_in_place",
    "fate_of",
    "fits",
    "is_gated",
    "is_scaled_up",
    "sums_to_one",
]

_ALIKE = 0.01  # half precision rounds what dropout scaled up


def is_gated(weights: Tensor, used: Tensor, *, dim: int | None = -1, dropped: bool = False) -> bool:
    """Whether weights were changed by something that is no part of attention.

    Dropout, which makes some 0 and may scale the others up, is none; nor are rows that were made 0
    as a whole, which have no key to attend to.

    Args:
        weights: as the softmax gave them.
        used: the same shape, after one more operation.
        dim: the axis of the keys; None where nobody can tell.
        dropped: whether chance had a part in it.

    Example:
        >>> import torch
        >>> from regard.capture.weight_integrity import is_gated
        >>> even = torch.full((3, 3), 1 / 3)
        >>> used = even * torch.tensor([0.0, 2.0, 2.0])
        >>> is_gated(even, even.tril()), is_gated(even, used), is_gated(even, used, dropped=True)
        (True, True, False)
    """
    rounding = 2 * torch.finfo(used.dtype).eps
    same = torch.isclose(used, weights, rtol=rounding, atol=0, equal_nan=True)
    # NaN is what a softmax gives for a row without keys; 0 is what such a row means.
    differ = ~same & ~(weights.isnan() & (used == 0))
    if bool(differ.any()) and dim is not None:
        differ &= ~(used == 0).all(dim, keepdim=True)
    if not bool(differ.any()):
        return False
    return not (dropped and _are_scaled_alike(weights, used, where=used != 0))


def is_scaled_up(weights: Tensor, used: Tensor) -> bool:
    """Whether all numbers were multiplied with one factor of at least 1, as dropout ends.

    Args:
        weights: of which chance has made some 0.
        used: the same shape, after one more operation.

    Example:
        >>> import torch
        >>> from regard.capture.weight_integrity import is_scaled_up
        >>> weights = torch.tensor([0.5, 0.0, 0.25])
        >>> is_scaled_up(weights, weights / 0.5), is_scaled_up(weights, weights * 0.5)
        (True, False)
    """
    there = weights != 0
    return torch.equal(there, used != 0) and _are_scaled_alike(weights, used, where=there)


def _are_scaled_alike(weights: Tensor, used: Tensor, *, where: Tensor) -> bool:
    factors = (used / weights)[where]
    largest = factors.max() if factors.numel() else factors.new_ones(())
    return bool((largest > 1 - _ALIKE) & (factors > (1 - _ALIKE) * largest).all())


class Fate(NamedTuple):
    """What an operation has made of weights.

    Attributes:
        changed: whether they are no longer what the softmax gave.
        thinned: whether chance has made some of them 0, and nothing has scaled the others up yet.
        emptied: the rows that it has made 0 as a whole, of size 1 along the keys; None: none.
    """

    changed: bool
    thinned: bool = False
    emptied: Tensor | None = None


def fate_of(
    operation: Operation,
    weights: Tensor,
    used: Tensor,
    dim: int | None,
    *,
    dropped: bool,
    thinned: bool,
) -> Fate:
    """What an operation that gave ``used`` has made of weights.

    Args:
        operation: what has run.
        weights: what it was given.
        used: what it gave: element by element, repeated where the shape is larger.
        dim: the axis of the keys in it; None where nobody can tell.
        dropped: whether one of its arguments was drawn by chance.
        thinned: whether they were thinned before.
    """
    if operation.func in _DROPOUTS:
        return Fate(changed=False)
    if fits(weights, used):
        weights = weights.to(used.dtype).expand_as(used)
        fate = _fate(weights, used, dim, dropped=dropped, thinned=thinned)
        if fate.changed or dropped or dim is None:
            return fate
        return fate._replace(emptied=_rows_of_zeros(used, dim, before=weights))
    same = weights.numel() == used.numel()
    return Fate(not (same and torch.equal(weights.to(used.dtype).flatten(), used.flatten())))


def _fate(weights: Tensor, used: Tensor, dim: int | None, *, dropped: bool, thinned: bool) -> Fate:
    if is_gated(weights, used, dim=dim, dropped=dropped):
        return Fate(not (thinned and is_scaled_up(weights, used)))
    unscaled = bool((used <= (1 + _ALIKE) * weights).all())
    return Fate(changed=False, thinned=thinned or (dropped and unscaled))


def _rows_of_zeros(used: Tensor, dim: int, *, before: Tensor | None = None) -> Tensor | None:
    """Rows that are 0 as a whole, and were not before; None where there are none."""
    rows = (used == 0).all(dim, keepdim=True)
    if before is not None:
        rows &= (before > 0).any(dim, keepdim=True)
    return rows if bool(rows.any()) else None


def fate_in_place(
    operation: Operation,
    whole: Tensor,
    dim: int | None,
    *,
    short: bool,
    dropped: bool,
    thinned: bool,
) -> Fate:
    """What an operation in place has made of weights; what they were nobody knows any more.

    Args:
        operation: what has run.
        whole: the weights, after it.
        dim: the axis of the keys; None where nobody can tell.
        short: whether rows sum to less than 1, as a sink has taken its share.
        dropped: whether one of its arguments was drawn by chance.
        thinned: whether they were thinned before.
    """
    if operation.func in _DROPOUTS:
        return Fate(changed=False)
    factor = _factor(operation, dropped=dropped)
    if factor is not None:
        factor = factor.to(whole.dtype).expand(operation.args[0].shape)
        even = torch.ones_like(factor)
        fate = _fate(even, factor, None, dropped=dropped, thinned=thinned)
        if not fate.changed:
            return fate
    if _puts_numbers(operation) or dim is None or short or not sums_to_one(whole, dim):
        return Fate(changed=True)
    return Fate(changed=False, emptied=_rows_of_zeros(whole, dim))


def _puts_numbers(operation: Operation) -> bool:
    """Whether an operation puts others than 0 into weights."""
    place = ASSIGNMENTS.get(operation.func)
    if place is None:
        return False
    value: Any = operation.args[place]
    return bool((value != 0).any()) if isinstance(value, Tensor) else value != 0


def _factor(operation: Operation, *, dropped: bool) -> Tensor | None:
    """What an operation in place multiplies with; None where it does something else."""
    if dropped and operation.func in _FILLS:
        _, where, value = operation.args
        return (~where).float() if value == 0 else None
    if operation.func not in (*MULTIPLICATIONS, *QUOTIENTS):
        return None
    by: Any = operation.args[1]
    factor = by if isinstance(by, Tensor) else torch.tensor(float(by), device="cpu")
    return factor if operation.func in MULTIPLICATIONS else factor.reciprocal()


def sums_to_one(numbers: Tensor, dim: int) -> bool:
    """Whether all rows sum to 1, but for those of zeros or NaN, which have no key to attend to.

    Args:
        numbers: not negative.
        dim: the axis of the rows' elements.

    Example:
        >>> import torch
        >>> from regard.capture.weight_integrity import sums_to_one
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
_FILLS = (aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
CHANCE = frozenset(
    (
        *(aten.bernoulli_.float, aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli_.Tensor),
        *(aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.uniform_.default),
    )
)
"""What draws the numbers of which dropout is made."""
