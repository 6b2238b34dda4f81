"""Masks that are assigned to scores, index by index or view by view, beside what they mean."""

import torch
from torch import Tensor

from handwritten_softmaxes import CAUSAL, INF, Answer, Case, T, causal

LAST = torch.tensor([3, 4])


def masked(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, -INF).softmax(-1)


def first_three(scores: Tensor) -> Tensor:
    return masked(scores, torch.arange(T) < 3)


def one_key(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores[..., 3] = -INF
    scores[:, :, :, -1].fill_(-1e9)
    weights = scores.softmax(-1)
    return weights, weights @ v


def a_slice_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT * 0.5
    scores[..., 3:] = torch.tensor(-INF)
    weights = scores.softmax(-1)
    return weights, weights @ v


def halved(scores: Tensor) -> Tensor:
    return first_three(scores / 2)


def keys_by_index(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores[..., LAST] = -INF
    weights = scores.softmax(-1)
    return weights, weights @ v


def keys_by_index_fill(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).index_fill(-1, LAST, -INF).softmax(-1)
    return weights, weights @ v


def keys_by_index_fill_in_place(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores.index_fill_(3, LAST, torch.tensor(-INF))
    weights = scores.softmax(-1)
    return weights, weights @ v


def a_mask_after_colons(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores[:, :, ~CAUSAL] = -INF
    weights = scores.softmax(-1)
    return weights, weights @ v


def a_mask_of_some_heads(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores[:, 1:].masked_fill_(~CAUSAL, -INF)
    weights = scores.softmax(-1)
    return weights, weights @ v


def causal_but_for_the_first_head(scores: Tensor) -> Tensor:
    free = torch.tensor([True, False, False])[:, None, None]
    return masked(scores, CAUSAL | free)


def each_sequence_by_itself(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    for entry, length in enumerate((5, 2)):
        scores[entry, :, :, length:] = -INF
    weights = scores.softmax(-1)
    return weights, weights @ v


def padded(scores: Tensor) -> Tensor:
    lengths = torch.tensor([5, 2])[:, None, None, None]
    return masked(scores, torch.arange(T) < lengths)


def each_query_by_itself(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    for query in range(T):
        scores[:, :, query, query + 1 :] = -INF
    weights = scores.softmax(-1)
    return weights, weights @ v


def pairs_by_index(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    rows, columns = torch.triu_indices(T, T, offset=1)
    scores[..., rows, columns] = -INF
    weights = scores.softmax(-1)
    return weights, weights @ v


def diagonal(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores.diagonal(dim1=-2, dim2=-1).fill_(-INF)
    weights = scores.softmax(-1)
    return weights, weights @ v


def others(scores: Tensor) -> Tensor:
    return masked(scores, ~torch.eye(T, dtype=torch.bool))


def merged_view(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = torch.bmm(q.reshape(6, T, 7), k.reshape(6, T, 7).mT)
    scores.view(2, 3, T, T)[1, :, :, 2:] = -INF
    weights = scores.softmax(-1)
    return weights.view(2, 3, T, T), torch.bmm(weights, v.reshape(6, T, 7))


def scattered(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores = scores.scatter(-1, LAST.expand(2, 3, T, 2), -INF)
    weights = scores.softmax(-1)
    return weights, weights @ v


def tril_of_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = torch.tril(q @ k.mT)
    weights = scores.masked_fill(scores == 0, -INF).softmax(-1)
    return weights, weights @ v


def best(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    mask = torch.full_like(scores, -INF).scatter(-1, scores.topk(2).indices, 0.0)
    weights = (scores + mask).softmax(-1)
    return weights, weights @ v


def best_where(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    kept = torch.zeros_like(scores).scatter_(-1, scores.topk(2).indices, 1.0)
    weights = torch.where(kept > 0, scores, torch.full_like(scores, -INF)).softmax(-1)
    return weights, weights @ v


def best_scattered(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    found = scores.topk(2, dim=-1)
    kept = torch.full_like(scores, -INF).scatter(-1, found.indices, found.values)
    weights = kept.softmax(-1)
    return weights, weights @ v


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    places = scores.argsort(-1, descending=True)[..., :2]
    kept = scores.new_full(scores.shape, -INF)
    kept.scatter_(-1, places, scores.gather(-1, places))
    weights = kept.softmax(-1)
    return weights, weights @ v


def best_two(scores: Tensor) -> Tensor:
    return masked(scores, scores >= scores.topk(2).values[..., 1:])


def bounded_below(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = (q @ k.mT).masked_fill(~CAUSAL.tril(-1), -INF)
    weights = scores.clamp(min=-1e4).softmax(-1)
    return weights, weights @ v


def bounded_sum(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    mask = torch.zeros(T, T).masked_fill(~CAUSAL.tril(-1), -INF)
    scores = (q @ k.mT + mask).clamp_(min=torch.finfo(torch.float32).min)
    weights = scores.softmax(-1)
    return weights, weights @ v


def without_infinities(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = (q @ k.mT).masked_fill(~CAUSAL.tril(-1), -INF)
    weights = torch.nan_to_num(scores, nan=0.0).softmax(-1)
    return weights, weights @ v


def without_infinities_in_place(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = (q @ k.mT).masked_fill(~CAUSAL.tril(-1), -INF)
    weights = scores.nan_to_num_(neginf=-1e9).softmax(-1)
    return weights, weights @ v


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """The mask's lowest number, and then a larger one."""
    lowest = torch.finfo(q.dtype).min
    scores = q @ k.mT + torch.triu(torch.full((T, T), lowest), 1)
    weights = scores.clamp(min=-5e4, max=5e4).softmax(-1)
    return weights, weights @ v


def bounds_beyond_what_is_there(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Narrow bounds that change nothing are nothing."""
    scores = (q @ k.mT).clamp(-80, 80)
    scores = scores.masked_fill(~CAUSAL, -INF)
    weights = scores.softmax(-1)
    return weights, weights @ v


MASKS = (
    Case(one_key, first_three),
    Case(a_slice_of_keys, halved),
    Case(keys_by_index, first_three),
    Case(a_mask_after_colons, causal),
    Case(a_mask_of_some_heads, causal_but_for_the_first_head),
    Case(each_sequence_by_itself, padded),
    Case(each_query_by_itself, causal),
    Case(pairs_by_index, causal),
    Case(diagonal, others),
    Case(merged_view, padded),
    Case(best, best_two),
    Case(best_where, best_two),
    Case(bounds_beyond_what_is_there, causal),
)

REFUSED = (
    *(best_scattered, gathered, keys_by_index_fill, keys_by_index_fill_in_place, scattered),
    *(tril_of_the_scores, without_infinities, without_infinities_in_place),
    *(bounded_below, bounded_sum, clamped),
)
"""Refused with the line: scores in new places, and masks that few people write."""
