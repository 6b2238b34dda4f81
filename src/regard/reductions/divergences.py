"""Divergences between the rows of two matrices, in one pass over both.

They are computed from scores and logsumexps, not from the logarithms of weights: the logarithm of a
weight that underflows to 0 is still finite.
"""

from abc import abstractmethod
from dataclasses import dataclass
from math import log
from typing import cast, final

import torch
from torch import Tensor

from regard.masks import Mask
from regard.reductions.block import Block, RowStatistics
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.box import Box
from regard.scores.score_source import Scores, lowest_score, reads_without_sync

__all__ = ["CrossEntropy", "Divergence", "JensenShannon", "KullbackLeibler"]

_LOG_2 = log(2)
# This many numbers stay in the cache, where a dozen passes over them cost little.
_NUMBERS_AT_ONCE = 2**16


@dataclass(frozen=True, eq=False)
class Divergence(Reduction):
    """One number for each row of A and the same row of B, a matrix of the same shape.

    Args:
        source: the scores of B.
        mask: the mask of B.
    """

    thread_safe = True

    source: Scores
    mask: Mask | None

    @abstractmethod
    def sums(self, own: Block, other: Block) -> tuple[Tensor, Tensor]:
        """Return the two sums over the keys that ``combine`` needs, each (..., rows).

        The columns of ``other`` include those of ``own`` and all keys that the rows of ``other``
        may attend to.
        """

    @abstractmethod
    def combine(
        self, own: RowStatistics, other: RowStatistics, sums: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the divergence of each row, (..., rows), from the sums and both normalizers."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.source.tensors

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
            other = block.aligned_block(self.source, self.mask, self.columns(block.box))
            numbers = self.combine(block, other, self.sums(block, other))
        return (Contribution(block.box.at_rows, numbers),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


class _Crossed(Divergence):
    """Divergences with logarithms of B's weights: inf where B masks a key that A does not.

    The sums are the mean of B's scores, shifted by their maximum, under A's weights; and how many
    of A's keys B masks.
    """

    def sums(self, own: Block, other: Block) -> tuple[Tensor, Tensor]:
        inside, _ = _columns_in(own, other)
        below = other.shifted[..., inside].to(own.weights.dtype)
        mean = cast(Tensor, torch.linalg.vecdot(own.weights, below))
        # On the CPU one cheap pass replaces three if ``other`` masks no key.
        lowest = lowest_score(below.dtype)
        if reads_without_sync(below) and bool(other.shifted.detach().amin() > lowest):
            return mean, torch.zeros_like(mean)
        return mean, (own.allowed & ~other.allowed[..., inside]).sum(-1)


@final
class CrossEntropy(_Crossed):
    """The reduction behind ``regard.cross_entropy``."""

    def combine(
        self, own: RowStatistics, other: RowStatistics, sums: tuple[Tensor, Tensor]
    ) -> Tensor:
        mean, hidden = sums
        return _inf_where(hidden, other.log_normalizer * own.row_sum - mean)


@final
class KullbackLeibler(_Crossed):
    """The reduction behind ``regard.kl``."""

    def combine(
        self, own: RowStatistics, other: RowStatistics, sums: tuple[Tensor, Tensor]
    ) -> Tensor:
        mean, hidden = sums
        entropy = own.log_normalizer * own.row_sum - own.mean_shifted
        numbers = other.log_normalizer * own.row_sum - mean - entropy
        # With a sink the weights sum to less than 1, and the true divergence can be negative.
        least = torch.where(own.row_sum == 1, 0.0, -torch.inf)
        return _inf_where(hidden, _within(numbers, least))


@final
class JensenShannon(Divergence):
    """The reduction behind ``regard.js``.

    Let p and q be the weights of a key, m the larger one, and r = exp(-x) the ratio of the smaller
    to the larger. The key adds ``m ((1 + r) (log 2 - log(1 + r)) - x r) / 2``. No part of it
    overflows or cancels. The sums are those of the keys in A's block, without the factor 1/2; and
    the sum of B's weights at all other keys.
    """

    def sums(self, own: Block, other: Block) -> tuple[Tensor, Tensor]:
        inside, outside = _columns_in(own, other)
        shift = (other.log_normalizer - own.log_normalizer)[..., None]
        pairs = (own.weights, other.weights[..., inside], own.shifted, other.shifted[..., inside])
        height = max(1, _NUMBERS_AT_ONCE // own.shifted[..., 0, :].numel())
        total = torch.cat(
            [
                _twice_js(*(tensor[..., first : first + height, :] for tensor in (*pairs, shift)))
                for first in range(0, shift.shape[-2], height)
            ],
            -1,
        )
        first, last = (other.weights[..., columns].sum(-1) for columns in outside)
        return total, first + last

    def combine(
        self, own: RowStatistics, other: RowStatistics, sums: tuple[Tensor, Tensor]
    ) -> Tensor:
        total, outside = sums
        numbers = (total + _LOG_2 * outside) / 2
        return _within(numbers, numbers.new_zeros(()), numbers.new_full((), _LOG_2))


def _twice_js(p: Tensor, q: Tensor, p_below: Tensor, q_below: Tensor, shift: Tensor) -> Tensor:
    apart = (p_below - q_below + shift).abs()
    ratio = (-apart).exp()
    of_larger = (1 + ratio) * (_LOG_2 - ratio.log1p()) - apart * ratio
    return cast(Tensor, torch.linalg.vecdot(torch.maximum(p, q), of_larger))


def _inf_where(hidden: Tensor, numbers: Tensor) -> Tensor:
    """Return the numbers, with inf for rows with a hidden key."""
    return numbers.masked_fill((hidden > 0) & ~numbers.isnan(), torch.inf)


def _within(numbers: Tensor, low: Tensor, high: Tensor | None = None) -> Tensor:
    """Clamp numbers that rounding alone moves out of bounds, with an unchanged gradient."""
    return numbers + (numbers.clamp(low, high) - numbers).detach()


def _columns_in(own: Block, other: Block) -> tuple[slice, tuple[slice, slice]]:
    """Return slices of the columns of ``other``: those of ``own``, and those on either side."""
    start = own.box.columns.start - other.box.columns.start
    stop = own.box.columns.stop - other.box.columns.start
    return slice(start, stop), (slice(0, start), slice(stop, None))
