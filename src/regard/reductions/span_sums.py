"""Sums over spans of an axis, which may overlap."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.scores.score_source import sum_dtype

_FEW_SPANS = 32  # up to this number, summing spans one by one is faster


def span_sums(numbers: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the sum over each span of the last axis, (..., spans).

    A reshape sums neighbouring spans of equal length, the last of which may be cut. Otherwise the
    sums form a binary tree: level n has the sums of 2**n neighbouring numbers. A span needs at most
    two sums from each level. Memory is linear, and spans may overlap. Differences of cumulative
    sums would lose small numbers next to large ones.

    Args:
        numbers: (..., length).
        spans: (start, stop) pairs, clipped to 0 and length.
    """
    first, width = spans[0][0], spans[0][1] - spans[0][0]
    edges = range(first, first + width * len(spans) + 1, max(width, 1))
    beyond = spans[-1][1] - numbers.shape[-1]
    # Many spans are short, so that what the last one lacks is little.
    is_cut = 0 < beyond < width and len(spans) > _FEW_SPANS
    if first >= 0 and (beyond <= 0 or is_cut) and list(pairwise(edges)) == list(spans):
        some = pad(numbers, (0, beyond)) if is_cut else numbers
        some = some[..., first : edges[-1]]
        return some.view(*numbers.shape[:-1], len(spans), width).sum(-1)
    # The gradient of indexing is reproducible on a GPU, but on a CPU only in float64.
    numbers = numbers.to(sum_dtype(numbers.dtype, numbers.device))
    if len(spans) <= _FEW_SPANS:
        sums = [numbers[..., max(start, 0) : max(stop, 0)].sum(-1) for start, stop in spans]
        return torch.stack(sums, -1)
    start, stop = torch.tensor(spans, device="cpu").clamp(0, numbers.shape[-1]).unbind(-1)
    total = numbers.new_zeros((*numbers.shape[:-1], len(spans)))
    while numbers.shape[-1]:
        left = start < stop
        for taken, index in ((left & (start % 2 == 1), start), (left & (stop % 2 == 1), stop - 1)):
            at = index.where(taken, 0).to(numbers.device, non_blocking=True)
            chosen = taken.to(numbers.device, non_blocking=True)
            total = total + torch.where(chosen, numbers[..., at], 0.0)
        start, stop = (start + 1) // 2, stop // 2
        even = numbers.shape[-1] // 2 * 2
        numbers = numbers[..., 0:even:2] + numbers[..., 1:even:2]
    return total
