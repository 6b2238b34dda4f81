"""Statistics of each row: logsumexp and entropy."""

from dataclasses import dataclass
from math import log
from typing import final

import torch

from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, RowStatistic

__all__ = ["MASKED_SCORE", "Entropy", "LogSumExp", "NormalizedEntropy"]

# Some models mask by adding a low number, which may be the lowest of their dtype or only -10,000.
MASKED_SCORE = -5_000.0
"""A score so low is that of a key that is masked."""


@final
@dataclass(frozen=True)
class LogSumExp(RowStatistic):
    """log of the sum over the keys of exp(scores), for each query, in nats.

    The answer has shape (..., num_heads, q_len); -inf for a query with no key to attend to.

    Example:
        >>> import torch, regard
        >>> regard.attend(torch.zeros(1, 4), torch.zeros(2, 4)).reduce(regard.LogSumExp())
        tensor([0.6931])
    """

    def update(self, block: Block) -> tuple[Contribution, ...]:
        return (Contribution(block.box.at_rows, block.logsumexp),)


@final
@dataclass(frozen=True)
class Entropy(RowStatistic):
    """The entropy of each query's weights, -sum(w log w), in nats (Shannon 1948).

    From 0 (all attention on one key) to log(kv_len) (spread evenly); 0 for a query with no key.
    Beside a sink the sum goes over the keys alone. The answer has shape (..., num_heads, q_len).
    Computed as (L - m) sum(w) - sum(w (s - m)) with the scores s, their logsumexp L and their
    maximum m, which cancels least.

    Example:
        >>> import torch, regard
        >>> regard.attend(torch.zeros(1, 4), torch.zeros(2, 4)).reduce(regard.Entropy())
        tensor([0.6931])
    """

    def update(self, block: Block) -> tuple[Contribution, ...]:
        entropy = block.log_normalizer * block.row_sum - block.mean_shifted
        below_0 = entropy.detach().clamp(max=0)  # which only rounding is; the slope stays as it is
        return (Contribution(block.box.at_rows, entropy - below_0),)


@final
@dataclass(frozen=True)
class NormalizedEntropy(RowStatistic):
    """The entropy of each query divided by its maximum: 0 is one key, 1 is all keys alike.

    The entropy of its weights as a share of log(n), n the number of keys that it may attend to; 0
    where n is 1 or 0, and 1 where it is more, as it can be beside a sink. The answer has shape
    (..., num_heads, q_len). Ours.

    Example:
        >>> import torch, regard
        >>> from regard.reductions.row_statistics import NormalizedEntropy
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Causal()).reduce(NormalizedEntropy())
        tensor([0., 1., 1.])
    """

    def update(self, block: Block) -> tuple[Contribution, ...]:
        entropy = block.log_normalizer * block.row_sum - block.mean_shifted
        keys = (block.log2_shifted > MASKED_SCORE / log(2)).sum(-1, dtype=torch.int32)
        # Of one key log(n) is 0, and beside a sink the entropy is not; a product keeps NaN.
        spread = (entropy / keys.clamp(min=2).log()).clamp(0, 1) * (keys > 1)
        return (Contribution(block.box.at_rows, spread),)
