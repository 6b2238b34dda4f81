"""Statistics of each row: logsumexp, largest score and entropy."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from regard.reductions.block import RowStatistics
from regard.reductions.needs import Needs
from regard.reductions.reduction import Contribution, RowStatistic


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

    thread_safe = True

    @property
    def needs(self) -> Needs:
        return Needs()

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        return (Contribution(block.box.at_rows, block.logsumexp),)


@final
@dataclass(frozen=True)
class MaxScore(RowStatistic):
    """The largest score of each query, over the keys that it may attend to.

    Scores are the numbers before the softmax, after scale, bias, score_mod, softcap and mask. A
    sink_bias is not a score. The answer has shape (..., num_heads, q_len). It is -inf for a query
    with no key to attend to, and NaN if one of the scores is NaN.

    The gradient flows to the largest score. As in ``torch.amax``, keys that share the largest score
    share the gradient evenly; the Triton kernels give it to the first of them.

    Example:
        >>> import torch, regard
        >>> query, key = torch.tensor([[2.0]]), torch.tensor([[1.0], [3.0]])
        >>> regard.attend(query, key).reduce(regard.MaxScore())
        tensor([6.])
    """

    thread_safe = True

    @property
    def needs(self) -> Needs:
        return Needs(largest_score=True)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        return (Contribution(block.box.at_rows, block.largest_score),)


@final
@dataclass(frozen=True)
class Entropy(RowStatistic):
    """The entropy of each query's weights, -sum(w log w), in nats (Shannon 1948).

    From 0 (all attention on one key) to log(kv_len) (spread evenly); 0 for a query with no key.
    With a sink_bias the sum covers the keys alone. The answer has shape (..., num_heads, q_len).
    The formula is (L - m) sum(w) - sum(w (s - m)) with the scores s, their logsumexp L and their
    maximum m. Of the equivalent formulas it loses the least precision to cancellation.

    Example:
        >>> import torch, regard
        >>> regard.attend(torch.zeros(1, 4), torch.zeros(2, 4)).reduce(regard.Entropy())
        tensor([0.6931])
    """

    thread_safe = True

    @property
    def needs(self) -> Needs:
        return Needs(mean_shifted=True)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        entropy = block.log_normalizer * block.row_sum - block.mean_shifted
        # Only rounding makes an entropy negative. Detached, so that the gradient does not change.
        below_0 = entropy.detach().clamp(max=0)
        return (Contribution(block.box.at_rows, entropy - below_0),)


@final
@dataclass(frozen=True)
class NormalizedEntropy(RowStatistic):
    """The entropy of each query divided by its maximum: 0 is one key, 1 is all keys alike.

    The entropy is divided by log(n), where n is the number of keys that the query may attend to. It
    is 0 if n is 0 or 1. With a sink_bias the quotient can exceed 1; it is then set to 1. The answer
    has shape (..., num_heads, q_len). This statistic is specific to regard.

    Example:
        >>> import torch, regard
        >>> from regard.reductions.row_statistics import NormalizedEntropy
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Causal()).reduce(NormalizedEntropy())
        tensor([0., 1., 1.])
    """

    thread_safe = True

    @property
    def needs(self) -> Needs:
        return Needs(keys=True, mean_shifted=True)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        entropy = block.log_normalizer * block.row_sum - block.mean_shifted
        normalized = self.normalized(entropy, block.visible_keys)
        return (Contribution(block.box.at_rows, normalized),)

    @staticmethod
    def normalized(entropy: Tensor, keys: Tensor) -> Tensor:
        """Return the entropy of rows divided by its maximum, given the number of visible keys."""
        # log(1) is 0, but with a sink the entropy of one key is not. Multiplying by 0 keeps NaN.
        return (entropy / keys.clamp(min=2).log()).clamp(0, 1) * (keys > 1)
