"""Divergences between the rows of two attention matrices, the losses of distillation.

Each takes one sweep over both matrices and forms neither. They are computed from scores and
logsumexps, not from the logarithms of weights: the logarithm of a weight that underflows to 0 is
still finite.
"""

from abc import abstractmethod
from dataclasses import dataclass
from math import log
from typing import cast, final

import torch
from torch import Tensor

from regard.errors import check_same_device, shape_text
from regard.matrix.attention_matrix import AttentionMatrix, check_attention_matrix
from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.score_source import accumulation_dtype, lowest_score, reads_without_sync

__all__ = ["CrossEntropy", "JensenShannon", "KullbackLeibler", "cross_entropy", "js", "kl"]

_LOG_2 = log(2)
# This many numbers stay in the cache, where a dozen passes over them cost little.
_NUMBERS_AT_ONCE = 2**16


def kl(A: AttentionMatrix, B: AttentionMatrix) -> Tensor:
    """Compute the Kullback-Leibler divergence of each row of A from that of B, in nats.

    It is ``sum over j of A[i, j] (log A[i, j] - log B[i, j])``, which is 0 for equal rows. A key
    without weight in A adds 0. If a row of A may attend to a key that B masks, the row's divergence
    is inf, however small the weight of that key. A row of A without keys gives 0. With a sink_bias
    the sum covers the keys alone, and can be below 0.

    Args:
        A: (..., num_heads, q_len, kv_len); in distillation the teacher, ``teacher.detach()``.
        B: of the same shape; head_dim, masks, dtypes and kinds of scores may differ.

    Returns:
        (..., num_heads, q_len), float32, or float64 if A or B is; differentiable in both.

    Raises:
        TypeError: A or B is not an AttentionMatrix.
        ValueError: their shapes or devices differ.

    Example:
        >>> import torch, regard
        >>> teacher = regard.AttentionMatrix.from_weights(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> student = regard.AttentionMatrix.from_weights(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
        >>> regard.kl(teacher, student)
        tensor([0.1438, 0.6931])

    Source:
        Wang et al. 2020, "MiniLM: Deep Self-Attention Distillation", section 3.1.
    """
    asked, other = _checked(A, B)
    return cast(Tensor, asked.reduce(KullbackLeibler(other)))


def cross_entropy(A: AttentionMatrix, B: AttentionMatrix) -> Tensor:
    """Compute the cross-entropy of each row of B relative to that of A, in nats.

    It is ``-sum over j of A[i, j] log B[i, j]``, the entropy of A plus ``kl(A, B)``. As a loss for
    B it has the gradient of ``kl``. The conventions are those of ``kl``.

    Args:
        A: (..., num_heads, q_len, kv_len); in distillation the teacher, ``teacher.detach()``.
        B: of the same shape; head_dim, masks, dtypes and kinds of scores may differ.

    Returns:
        (..., num_heads, q_len), float32, or float64 if A or B is; differentiable in both.

    Raises:
        TypeError: A or B is not an AttentionMatrix.
        ValueError: their shapes or devices differ.

    Example:
        >>> import torch, regard
        >>> teacher = regard.AttentionMatrix.from_weights(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> student = regard.AttentionMatrix.from_weights(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
        >>> regard.cross_entropy(teacher, student)
        tensor([0.8370, 0.6931])
    """
    asked, other = _checked(A, B)
    return cast(Tensor, asked.reduce(CrossEntropy(other)))


def js(A: AttentionMatrix, B: AttentionMatrix) -> Tensor:
    """Compute the Jensen-Shannon divergence of each row of A and B, in nats, from 0 to log 2.

    It is the mean of the Kullback-Leibler divergences of both rows from their mean. It is
    symmetric, and finite where masks differ: log 2 if the rows share no key, half of that if one
    row has no keys.

    Args:
        A: (..., num_heads, q_len, kv_len).
        B: of the same shape; head_dim, masks, dtypes and kinds of scores may differ.

    Returns:
        (..., num_heads, q_len), float32, or float64 if A or B is; differentiable in both.

    Raises:
        TypeError: A or B is not an AttentionMatrix.
        ValueError: their shapes or devices differ.

    Example:
        >>> import torch, regard
        >>> one = regard.AttentionMatrix.from_weights(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        >>> other = regard.AttentionMatrix.from_weights(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> regard.js(one, other)
        tensor([0.6931, 0.0000])

    Source:
        Lin 1991, "Divergence Measures Based on the Shannon Entropy".
    """
    asked, other = _checked(A, B)
    return cast(Tensor, asked.reduce(JensenShannon(other)))


@dataclass(frozen=True, eq=False)
class _BetweenTwo(Reduction):
    """One number for each row of two matrices of the same shape."""

    thread_safe = True

    other: AttentionMatrix

    @abstractmethod
    def between(self, block: Block, other: Block) -> Tensor:
        """Return the number of each row, (..., rows), from these rows of both matrices.

        The columns of ``other`` include those of ``block``, and all keys that the rows of ``other``
        may attend to.
        """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.other.source.tensors

    @property
    def group(self) -> int:
        return self.other.source.group

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        source, mask, own = self.other.source, self.other.mask, block.box.columns
        if mask is None:
            columns = slice(0, block.shape[-1])
        else:
            some = mask.key_bounds(block.box.leading, block.box.rows, block.shape).any
            columns = slice(min(own.start, some.start), max(own.stop, some.stop))
        numbers = self.between(block, block.aligned_block(source, mask, columns))
        return (Contribution(block.box.at_rows, numbers.to(block.shifted.dtype)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


@final
@dataclass(frozen=True, eq=False)
class KullbackLeibler(_BetweenTwo):
    """The reduction behind ``regard.kl``.

    Args:
        other: B, the second matrix.
    """

    def between(self, block: Block, other: Block) -> Tensor:
        own = block.mean_shifted - block.log_normalizer * block.row_sum
        # With a sink the weights sum to less than 1, and the true divergence can be negative.
        least = torch.where(block.row_sum == 1, 0.0, -torch.inf)
        return _inf_where_hidden(_within(own + _crossed(block, other), least), block, other)


@final
@dataclass(frozen=True, eq=False)
class CrossEntropy(_BetweenTwo):
    """The reduction behind ``regard.cross_entropy``.

    Args:
        other: B, the second matrix.
    """

    def between(self, block: Block, other: Block) -> Tensor:
        return _inf_where_hidden(_crossed(block, other), block, other)


@final
@dataclass(frozen=True, eq=False)
class JensenShannon(_BetweenTwo):
    """The reduction behind ``regard.js``.

    Let p and q be the weights of a key, m the larger one, and r = exp(-x) the ratio of the smaller
    to the larger. The key adds ``m ((1 + r) (log 2 - log(1 + r)) - x r) / 2``. No part of it
    overflows or cancels.

    Args:
        other: B, the second matrix.
    """

    def between(self, block: Block, other: Block) -> Tensor:
        inside, outside = _columns_in(block, other)
        shift = (other.log_normalizer - block.log_normalizer)[..., None]
        pairs = (
            block.weights,
            other.weights[..., inside],
            block.shifted,
            other.shifted[..., inside],
        )
        height = max(1, _NUMBERS_AT_ONCE // block.shifted[..., 0, :].numel())
        total = torch.cat(
            [
                _twice_js(*(tensor[..., first : first + height, :] for tensor in (*pairs, shift)))
                for first in range(0, shift.shape[-2], height)
            ],
            -1,
        )
        for columns in outside:  # there the weights of the block are 0
            total = total + _LOG_2 * other.weights[..., columns].sum(-1)
        return _within(total / 2, total.new_zeros(()), total.new_full((), _LOG_2))


def _twice_js(p: Tensor, q: Tensor, p_below: Tensor, q_below: Tensor, shift: Tensor) -> Tensor:
    apart = (p_below - q_below + shift).abs()
    ratio = (-apart).exp()
    of_larger = (1 + ratio) * (_LOG_2 - ratio.log1p()) - apart * ratio
    return cast(Tensor, torch.linalg.vecdot(torch.maximum(p, q), of_larger))


def _crossed(block: Block, other: Block) -> Tensor:
    """Return the cross-entropy of each row, (..., rows), as if ``other`` masked no key."""
    inside, _ = _columns_in(block, other)
    below = other.shifted[..., inside].to(block.weights.dtype)
    expected = cast(Tensor, torch.linalg.vecdot(block.weights, below))
    return other.log_normalizer * block.row_sum - expected


def _inf_where_hidden(numbers: Tensor, block: Block, other: Block) -> Tensor:
    """Return the numbers, with inf for rows with a key that the other block hides."""
    inside, _ = _columns_in(block, other)
    below = other.shifted.detach()
    # On the CPU one cheap pass replaces three if ``other`` masks no key.
    if reads_without_sync(below) and bool(below.amin() > lowest_score(below.dtype)):
        return numbers
    hidden = (block.allowed & ~other.allowed[..., inside]).any(-1)
    return numbers.masked_fill(hidden & ~numbers.isnan(), torch.inf)


def _within(numbers: Tensor, low: Tensor, high: Tensor | None = None) -> Tensor:
    """Clamp numbers that rounding alone moves out of bounds, with an unchanged gradient."""
    return numbers + (numbers.clamp(low, high) - numbers).detach()


def _columns_in(block: Block, other: Block) -> tuple[slice, tuple[slice, slice]]:
    """Return slices of the columns of ``other``: those of ``block``, and those on either side."""
    start = block.box.columns.start - other.box.columns.start
    stop = block.box.columns.stop - other.box.columns.start
    return slice(start, stop), (slice(0, start), slice(stop, None))


def _checked(A: object, B: object) -> tuple[AttentionMatrix, AttentionMatrix]:
    """Return both matrices in one accumulation dtype."""
    asked, other = check_attention_matrix("A", A), check_attention_matrix("B", B)
    if other.shape != asked.shape:
        raise ValueError(
            f"B has shape {shape_text(other.shape)} and A has {shape_text(asked.shape)}; both must "
            "have one shape, (..., num_heads, q_len, kv_len).\n"
            "    Take the same part of both, such as A[:, :4]."
        )
    check_same_device("B", other.device, "A", asked.device, f"B.to({str(asked.device)!r})")
    wide = accumulation_dtype(torch.promote_types(asked.dtype, other.dtype))
    if wide == torch.float32:
        return asked, other
    return asked.to(wide), other.to(wide)
