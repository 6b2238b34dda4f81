"""The largest scores of each row; ties go to the lowest index."""

import torch
from torch import Tensor

from regard.scores.score_source import lowest_score, reads_without_sync

_ALL_BUT_SIGN = 2**31 - 1


def largest(scores: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest scores of each row, (..., rows, k), largest first.

    Ties go to the lowest position, except among masked keys, which do not matter.
    """
    if not reads_without_sync(scores):
        return _largest_unseen(scores, k)
    # torch.topk orders equal scores arbitrarily, and may pick any of those equal to the k-th.
    # The k + 1 largest reveal both cases.
    found, indices = scores.topk(min(k + 1, scores.shape[-1]), -1)
    ties = (found[..., 1:] == found[..., :-1]) & (found[..., 1:] > lowest_score(scores.dtype))
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
