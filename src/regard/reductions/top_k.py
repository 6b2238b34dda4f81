"""The largest weights of each row and the keys they belong to."""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from regard.errors import check_count, check_memory
from regard.reductions.block import Block, lowest_score, reads_without_sync
from regard.reductions.reduction import Contribution, Reduction

__all__ = ["Top", "TopK", "fitting", "padded"]

_ALL_BUT_SIGN = 2**31 - 1
# Columns per group: by default, in rows longer than _LONG, at the minimum. Tuned for k of 1 to 64.
_GROUP, _LONG_GROUP, _LEAST_GROUP = 8, 16, 4
_LONG = 4096


class Top(NamedTuple):
    """The largest weights of each row and the keys they belong to.

    Attributes:
        values: weights, in falling order.
        indices: int64 positions of the keys. The index is -1, with weight 0, beyond the number of
            keys that a row may attend to. It is -1, with weight NaN, if a score is NaN or +inf.

    Example:
        >>> import torch, regard
        >>> x = torch.eye(2)
        >>> regard.attend(x, x).topk(1).indices.tolist()
        [[0], [1]]
    """

    values: Tensor
    indices: Tensor


@final
@dataclass(frozen=True)
class TopK(Reduction):
    """The k largest weights of each query and their keys; ties go to the lowest index.

    The answer is a ``Top`` of values and int64 indices, each (..., num_heads, q_len, k). Where a
    query may attend to fewer than k keys, the remaining entries have weight 0 and index -1. A row
    with a score of NaN or +inf has weight NaN and index -1 in every entry. In a recording k may
    exceed the kv_len of a layer; the entries beyond kv_len are filled by the same rules.

    Args:
        k: how many keys, from 1 to kv_len of a matrix.

    Raises:
        TypeError: k is no whole number.
        ValueError: k is below 1, or larger than kv_len.

    Example:
        >>> import torch, regard
        >>> A = regard.AttentionMatrix.from_scores(torch.tensor([[0.0, 2.0, 1.0]]))
        >>> A.reduce(regard.TopK(2)).indices
        tensor([[1, 2]])
    """

    thread_safe = True

    k: int

    def __post_init__(self) -> None:
        check_count("k", self.k)

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        if self.k > shape[-1]:
            raise ValueError(
                f"k is {self.k}; it must be at most kv_len = {shape[-1]}.\n"
                f"    Use topk(min(k, {shape[-1]}))."
            )
        size = (*shape[:-1], self.k)
        remedy = "Ask for a smaller k, or for one head at a time, A[0, 3]."
        check_memory("TopK", size, torch.int64, remedy=remedy)
        values = torch.zeros(size, dtype=dtype, device=device)
        return values, torch.zeros(size, dtype=torch.int64, device=device)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        shifted = block.shifted.detach()
        indices = _largest(shifted, min(self.k, shifted.shape[-1]))
        masked = shifted.gather(-1, indices) <= lowest_score(shifted.dtype)
        undefined = block.log_normalizer.detach().isnan()[..., None]
        values = block.weights.gather(-1, indices)
        indices = (indices + block.box.columns.start).masked_fill(masked | undefined, -1)
        missing = self.k - indices.shape[-1]
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
            indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
        values = values.masked_fill(undefined, torch.nan)
        return Contribution(block.box.at_rows, values), Contribution(block.box.at_rows, indices)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Top:
        return Top(*buffers)


def fitting(reduction: Reduction, kv_len: int) -> Reduction:
    """Return the reduction; limit the k of a TopK to ``kv_len``.

    ``padded`` restores the missing entries in the answer.

    Example:
        >>> import regard
        >>> from regard.reductions.top_k import fitting
        >>> fitting(regard.TopK(8), 5), fitting(regard.Entropy(), 5)
        (TopK(k=5), Entropy())
    """
    return TopK(min(reduction.k, kv_len)) if isinstance(reduction, TopK) else reduction


def padded(reduction: Reduction, answer: Any) -> Any:
    """Pad the answer of a TopK to k entries, with weight 0 (NaN in a row of NaN) and index -1.

    The answer of any other reduction is returned unchanged.

    Args:
        reduction: the reduction requested.
        answer: the answer to ``fitting(reduction, kv_len)``.

    Example:
        >>> import torch, regard
        >>> from regard.reductions.top_k import padded
        >>> padded(regard.TopK(3), regard.Top(torch.ones(1), torch.tensor([0]))).indices
        tensor([ 0, -1, -1])
    """
    if not isinstance(reduction, TopK):
        return answer
    missing = (0, reduction.k - answer.values.shape[-1])
    pad = torch.nn.functional.pad
    values = pad(answer.values, missing)
    values = values.masked_fill(answer.values[..., :1].isnan(), torch.nan)
    return Top(values, pad(answer.indices, missing, value=-1))


def _largest(scores: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest scores of each row; ties to the lowest index."""
    if not reads_without_sync(scores):
        return _largest_unseen(scores, k)
    # torch.topk orders equal scores arbitrarily, and may pick any of those equal to the k-th.
    # The k + 1 largest reveal both cases. Ties among masked keys do not matter.
    depths, indices = _topk(scores, min(k + 1, scores.shape[-1]))
    shown = depths[..., 1:].view(scores.dtype) < -lowest_score(scores.dtype)
    ties = (depths[..., 1:] == depths[..., :-1]) & shown
    indices = indices[..., :k]
    tied = ties.any(-1, keepdim=True)
    if bool(tied.any()):
        stable = scores[tied.squeeze(-1)].sort(dim=-1, descending=True, stable=True).indices
        indices = indices.masked_scatter(tied, stable[..., :k])
    return indices


def _largest_unseen(scores: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest scores without synchronising the device.

    An integer made of a score and its position has no ties.
    """
    if scores.dtype != torch.float32:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, its equal
    rising = torch.where(bits < 0, bits ^ _ALL_BUT_SIGN, bits)
    rising = torch.where(scores.isnan(), _ALL_BUT_SIGN, rising)  # torch.topk sorts NaN first
    last = scores.shape[-1] - 1
    from_the_end = torch.arange(last, -1, -1, device=scores.device)
    return last - (((rising.long() << 32) | from_the_end).topk(k, -1).values & 0xFFFFFFFF)


def _topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the depths and positions of the k largest scores of each row, largest first.

    This is faster than torch.topk: the k largest scores lie in the k groups with the largest
    maxima. Group g of n holds the columns g, g + n, g + 2n, ..., so that one pass over whole rows
    finds the maxima. The k largest maxima are found in the same way.
    """
    columns = scores.shape[-1]
    size = _GROUP if columns <= _LONG else _LONG_GROUP
    while columns < 3 * k * size:
        size //= 2
    if size < _LEAST_GROUP:
        return _depths(scores).topk(k, -1, largest=False)
    groups = columns // size
    even = groups * size
    maxima = scores[..., :even].reshape(*scores.shape[:-1], size, groups).amax(-2)
    highest, best = _topk(maxima, k)  # (..., rows, k)
    steps = torch.arange(0, even, groups, device=scores.device)
    inside = (best[..., None] + steps).flatten(-2)  # (..., rows, k * size)
    if even < columns:
        rest = torch.arange(even, columns, device=scores.device)
        inside = torch.cat((inside, rest.expand(*inside.shape[:-1], -1)), -1)
    depths = _depths(scores.gather(-1, inside))
    # At least k scores reach the k-th largest maximum, so depths behind it need not be exact. They
    # are replaced by increasing numbers, which branch prediction handles well: topk takes half
    # the time.
    behind = torch.arange(1, inside.shape[-1] + 1, dtype=depths.dtype, device=scores.device)
    depths, places = torch.minimum(depths, highest[..., -1:] + behind).topk(k, -1, largest=False)
    return depths, inside.gather(-1, places)


def _depths(scores: Tensor) -> Tensor:
    """Map scores to integers in reverse order, which torch.topk compares a third faster.

    Floats of at least 0 sort like their bit patterns. A score that rounding puts above 0 becomes 0.
    """
    whole = torch.int64 if scores.dtype == torch.float64 else torch.int32
    return scores.clamp(max=0).abs_().view(whole)
