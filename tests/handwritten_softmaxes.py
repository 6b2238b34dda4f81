"""Softmaxes that are written as something else, each beside what it means in float64.

A way gives weights and output of query, key and value, (2, 3, 5, 7); its meaning gives the weights
of the scores, (2, 3, 5, 5) in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Answer = tuple[Tensor, Tensor]

T = 5
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
NEAR = CAUSAL & torch.ones(T, T, dtype=torch.bool).triu(-1)
INF = float("inf")


@dataclass(frozen=True)
class Case:
    """A way to write attention, and what it means."""

    way: Callable[[Tensor, Tensor, Tensor], Answer]
    meaning: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        return self.way.__name__


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(~CAUSAL, -INF).softmax(-1)


def logarithm(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = F.log_softmax(q @ k.mT, dim=-1).exp()
    return weights, weights @ v


def logarithm_in_place(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = torch.log_softmax((q @ k.mT).masked_fill_(~CAUSAL, -INF), -1).exp_()
    return weights, weights @ v


def logarithm_and_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    logs = (q @ k.mT).log_softmax(-1)
    weights = (logs + torch.zeros(T, T).masked_fill(~CAUSAL, -INF)).softmax(-1)
    return weights, weights @ v


def logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    weights = torch.exp(scores - scores.logsumexp(-1, keepdim=True))
    return weights, weights @ v


def logsumexp_in_place(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = (q @ k.mT).masked_fill(~CAUSAL, -INF)
    scores -= torch.logsumexp(scores, dim=-1, keepdim=True)
    scores.exp_()
    return scores, scores @ v


def logsumexp_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    most = scores.amax(-1, keepdim=True)
    lse = most + (scores - most).exp().sum(-1, keepdim=True).log()
    weights = (scores - lse).exp()
    return weights, weights @ v


def powers_of_two(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT * 1.4426950408889634
    powers = torch.exp2(scores - scores.amax(-1, keepdim=True))
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights @ v


def softmax_one(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(q @ k.mT)
    weights = powers / (1 + powers.sum(dim=-1, keepdim=True))
    return weights, weights @ v


def softmax_one_of_what_is_left(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """The row's maximum is subtracted, and the 1 is not: a published slip, and seen as it is."""
    scores = q @ k.mT
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    weights = powers / (powers.sum(dim=-1)[..., None] + 1)
    return weights, weights @ v


def softmax_one_stable(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    most = scores.amax(-1, keepdim=True).clamp(min=0)
    powers = torch.exp(scores - most)
    weights = powers / (torch.exp(-most) + powers.sum(-1, keepdim=True))
    return weights, weights @ v


def two_beside(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = (q @ k.mT).masked_fill(~CAUSAL, -INF).exp_()
    total = powers.sum(-1, keepdim=True)
    total += 2.0
    powers /= total
    return powers, powers @ v


def hardly_anything_beside(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = powers / (powers.sum(-1, keepdim=True) + 1e-9)
    return weights, weights @ v


def mask_times_powers(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(q @ k.mT) * CAUSAL
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights @ v


def mask_times_powers_over_a_bounded_sum(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    powers = (scores - scores.amax(-1, keepdim=True)).exp() * CAUSAL.float()
    weights = powers * (1 / powers.sum(-1, keepdim=True).clamp(min=1e-9))
    return weights, weights @ v


def filled_powers(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(q @ k.mT).masked_fill(~CAUSAL, 0)
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights @ v


def chosen_powers(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.where(CAUSAL, torch.exp(q @ k.mT), 0.0)
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights @ v


def triangle_of_powers(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(q @ k.mT).tril()
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights @ v


def powers_of_a_part_set_to_zero(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(q @ k.mT)
    powers[..., 3:] = 0
    powers /= powers.sum(-1, keepdim=True)
    return powers, powers @ v


def renormalised(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).softmax(-1) * CAUSAL
    weights = weights / weights.sum(-1, keepdim=True)
    return weights, weights @ v


def renormalised_twice(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).softmax(-1) * CAUSAL
    weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * NEAR
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-12)
    return weights, weights @ v


def renormalised_in_place(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).softmax(-1)
    weights *= CAUSAL
    weights /= weights.sum(-1, keepdim=True)
    return weights, weights @ v


def normalised_by_torch(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).softmax(-1).masked_fill(~CAUSAL, 0.0)
    weights = F.normalize(weights, p=1, dim=-1)
    return weights, weights @ v


def renormalised_with_numbers(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Not a mask: each key counts for more or less, as a bias does."""
    share = torch.tensor([0.1, 1.0, 2.0, 0.5, 0.0])
    weights = (q @ k.mT).softmax(-1) * share
    weights = weights / weights.sum(-1, keepdim=True)
    return weights, weights @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(k @ q.mT)
    weights = powers / powers.sum(-2, keepdim=True)
    return weights.mT, weights.mT @ v


def divided_at_the_end(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """As flash attention does: the sum divides what the exponentials have drawn from the value."""
    scores = (q @ k.mT).masked_fill(~CAUSAL, -INF)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = powers.sum(-1, keepdim=True)
    return powers / total, powers @ v / total


def one_beside_and_made_whole(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """What the sink took comes back."""
    powers = torch.exp(q @ k.mT)
    weights = powers / (1 + powers.sum(-1, keepdim=True))
    weights /= weights.sum(-1, keepdim=True)
    return weights, weights @ v


def exponentials(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(q @ k.mT)
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights @ v


def exponentials_less_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = (q @ k.mT).masked_fill(~CAUSAL, -INF)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = powers / powers.sum(-1)[..., None]
    return weights, weights @ v


SOFTMAXES = (
    Case(exponentials, softmax),
    Case(exponentials_less_the_largest, causal),
    Case(keys_first, softmax),
)
"""Seen as what they mean: exponentials divided by their sums."""

REFUSED = (
    *(logarithm, logarithm_in_place, logarithm_and_a_mask),
    *(logsumexp, logsumexp_in_place, logsumexp_by_hand, powers_of_two),
    *(softmax_one, softmax_one_of_what_is_left, softmax_one_stable, one_beside_and_made_whole),
    *(two_beside, hardly_anything_beside),
    *(mask_times_powers, mask_times_powers_over_a_bounded_sum, filled_powers, chosen_powers),
    *(triangle_of_powers, powers_of_a_part_set_to_zero),
    *(renormalised, renormalised_twice, renormalised_in_place, normalised_by_torch),
    *(renormalised_with_numbers, divided_at_the_end),
)
"""Refused with the line: no softmax, and no exponentials divided by their own sums."""
