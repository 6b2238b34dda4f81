"""Divergences between the rows of two matrices, in one pass over both.

They are sums of terms that are never negative, so that a small divergence does not cancel. The
terms are computed from scores and logsumexps, not from the logarithms of weights: the logarithm of
a weight that underflows to 0 is still finite.
"""

from abc import abstractmethod
from dataclasses import dataclass
from math import log
from typing import ClassVar, Protocol, cast, final

import torch
from torch import Tensor

from regard.masks import Mask
from regard.reductions.block import Block
from regard.reductions.needs import Needs
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.box import Box
from regard.scores.score_source import Scores, lowest_score, reads_without_sync

_LOG_2 = log(2)
# exp(x) counts as infinite beside 1 + x, also in float64.
_FAR = 50
# A dozen passes over this many numbers cost little: they stay in the cache of a CPU, or keep a GPU
# busy.
_NUMBERS_AT_ONCE, _GPU_NUMBERS_AT_ONCE = 2**16, 2**22


class RowNumbers(Protocol):
    """The numbers of complete rows of a matrix that a divergence needs; see ``RowStatistics``."""

    @property
    def maximum(self) -> Tensor:
        """The largest score of each row, (..., rows, 1)."""
        ...

    @property
    def row_sum(self) -> Tensor:
        """The sum of the weights, (..., rows)."""
        ...


@dataclass(frozen=True, eq=False)
class Divergence(Reduction):
    """One number for each row of A and the same row of B, a matrix of the same shape.

    Args:
        source: the scores of B.
        mask: the mask of B.

    Attributes:
        of_b_alone: the term of a key with weight 0 in A and 1 in B.
        needs_keys_of_a: True if the divergence is infinite where B masks a key that A does not.
    """

    of_b_alone: ClassVar[float]
    needs_keys_of_a: ClassVar[bool]

    source: Scores
    mask: Mask | None

    @abstractmethod
    def terms(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """Return the term of each key from its weights p in A and q in B, and log(q) - log(p).

        No term is below 0, apart from rounding.
        """

    @abstractmethod
    def combine(self, a: RowNumbers, b: RowNumbers, total: Tensor) -> Tensor:
        """Return the divergence of each row, (..., rows).

        Args:
            a: the rows of A.
            b: the rows of B.
            total: the sum of the terms over all keys, (..., rows), or inf: ``needs_keys_of_a``.
        """

    def total(self, a: Block, b: Block) -> Tensor:
        """Return the sum of the terms over all keys, (..., rows), or inf: ``needs_keys_of_a``.

        The columns of ``b`` include those of ``a`` and all keys that the rows of ``b`` may attend
        to.
        """
        inside, *outside = _columns_in(a, b)
        apart = (b.log_normalizer - a.log_normalizer)[..., None]
        keys = (a.weights, b.weights[..., inside], a.shifted, b.shifted[..., inside])
        numbers = _NUMBERS_AT_ONCE if reads_without_sync(apart) else _GPU_NUMBERS_AT_ONCE
        height = max(1, numbers // a.shifted[..., 0, :].numel())
        parts = [cast(tuple[Tensor, ...], each.split(height, -2)) for each in (*keys, apart)]
        sums = (
            self.terms(p, q, b_shifted - a_shifted - shift).sum(-1)
            for p, q, a_shifted, b_shifted, shift in zip(*parts, strict=True)
        )
        total = torch.cat(list(sums), -1)
        for columns in outside:
            if columns.start < columns.stop:
                total = total + self.of_b_alone * b.weights[..., columns].sum(-1)
        if self.needs_keys_of_a and _may_mask(b, inside):
            hidden = (a.allowed & ~b.allowed[..., inside]).any(-1)
            total = total.masked_fill(hidden & ~total.isnan(), torch.inf)
        return total

    @property
    def needs(self) -> Needs:
        return Needs(divergences=(self,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.source.tensors

    @property
    def runs_on_threads(self) -> bool:
        return self.source.runs_on_threads and (self.mask is None or self.mask.runs_on_threads)

    @property
    def group(self) -> int:
        return self.source.group

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def columns(self, box: Box) -> slice:
        """Return the columns of a box and all keys that its rows of B may attend to."""
        if self.mask is None:
            return slice(0, self.source.shape[-1])
        some = self.mask.key_bounds(box.leading, box.rows, self.source.shape).any
        return slice(min(box.columns.start, some.start), max(box.columns.stop, some.stop))

    def update(self, block: Block) -> tuple[Contribution, ...]:
        numbers = block.divergence(self)
        if numbers is None:
            b = block.aligned_block(self.source, self.mask, self.columns(block.box))
            numbers = self.combine(block, b, self.total(block, b))
        return (Contribution(block.box.at_rows, numbers),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


@final
class KullbackLeibler(Divergence):
    """The reduction behind ``regard.kl``: inf where B masks a key that A does not.

    With x = log(q) - log(p), the sum of ``p (exp(x) - 1 - x)`` over all keys is ``-sum(p x)``, the
    divergence, plus the sum of q minus the sum of p. Both sums are 1 without a sink.
    """

    of_b_alone = 1.0
    needs_keys_of_a = True

    def terms(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        near = x.clamp(max=_FAR)  # exp(x) may overflow
        return torch.where(x > near, q, p * (near.expm1() - near))

    def combine(self, a: RowNumbers, b: RowNumbers, total: Tensor) -> Tensor:
        numbers = total + (a.row_sum - b.row_sum)
        is_empty = (a.maximum == -torch.inf).squeeze(-1)
        numbers = numbers.masked_fill(is_empty & ~numbers.isnan(), 0)
        # With a sink the weights sum to less than 1, and the true divergence can be negative.
        numbers = _within(numbers, torch.where(a.row_sum == 1, 0.0, -torch.inf))
        return numbers.masked_fill(total == torch.inf, torch.inf)


@final
class JensenShannon(Divergence):
    """The reduction behind ``regard.js``.

    With p and q the weights of a key, m their mean, x = log(q) - log(p) and t = tanh(x / 2), the
    key adds ``m (x t + log(1 - t^2)) / 2``. If p and q are far apart, 1 - t^2 cancels. With r the
    ratio of the smaller to the larger, the key then adds half of the larger times
    ``(1 + r) (log 2 - log(1 + r)) + r log(r)``. The terms are those numbers without the factor 1/2.
    """

    of_b_alone = _LOG_2
    needs_keys_of_a = False

    def terms(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        near = x.clamp(-1, 1)
        slope = (near / 2).tanh()
        of_near = (p + q) / 2 * (near * slope + (-slope.square()).log1p())
        apart = x.abs()
        ratio = (-apart).exp()
        of_far = (1 + ratio) * (_LOG_2 - ratio.log1p()) - apart * ratio
        return torch.where(x == near, of_near, torch.maximum(p, q) * of_far)

    def combine(self, a: RowNumbers, b: RowNumbers, total: Tensor) -> Tensor:
        numbers = total / 2
        return _within(numbers, numbers.new_zeros(()), numbers.new_full((), _LOG_2))


def _within(numbers: Tensor, low: Tensor, high: Tensor | None = None) -> Tensor:
    """Clamp numbers that rounding alone moves out of bounds, with an unchanged gradient."""
    return numbers + (numbers.clamp(low, high) - numbers).detach()


def _may_mask(block: Block, columns: slice) -> bool:
    """Return False if a block masks no key in these columns, as far as one fast pass finds out."""
    shifted = block.shifted.detach()[..., columns]
    # The minimum may be NaN.
    return not (reads_without_sync(shifted) and shifted.amin().item() > lowest_score(shifted.dtype))


def _columns_in(a: Block, b: Block) -> tuple[slice, slice, slice]:
    """Return slices of the columns of ``b``: those of ``a``, and those on either side."""
    start = a.box.columns.start - b.box.columns.start
    stop = a.box.columns.stop - b.box.columns.start
    width = b.box.columns.stop - b.box.columns.start
    return slice(start, stop), slice(0, start), slice(stop, width)
