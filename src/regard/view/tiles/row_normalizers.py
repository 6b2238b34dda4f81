"""The two numbers of each row that turn its scores into weights, for a page that is a file."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.box import int_tensor

__all__ = ["RowNormalizers"]

_LEAST = 1e-30  # a sum of weights in float32 is exact down to 1e-38


@final
@dataclass(frozen=True)
class RowNormalizers(Reduction):
    """The maximum and the log-normalizer of each row, with all keys and without some of them.

    weight = exp((score - maximum) - log_normalizer), where the maximum is the largest score of the
    row, and the log-normalizer the log of the sum of exp(score - maximum). Where scores are large,
    their sum, the logsumexp, would round the log-normalizer away.

    The answer has shape (..., num_heads, q_len, 4): both numbers, then both of the row without the
    keys set aside. A row without keys has -inf and 0. It is float32, or float64 of such inputs.

    Args:
        aside: positions of the keys that are set aside.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.row_normalizers import RowNormalizers
        >>> A = regard.AttentionMatrix.from_scores(torch.tensor([[3.0, 2.0, 2.0]]))
        >>> A.reduce(RowNormalizers((0,)))  # two equal keys are left
        tensor([[3.0000, 0.5514, 2.0000, 0.6931]])
    """

    thread_safe = True

    aside: tuple[int, ...]

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(*shape[:-1], 4, dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        maximum, log_normalizer = block.maximum.squeeze(-1), block.log_normalizer
        first, stop = block.box.columns.start, block.box.columns.stop
        inside = [key - first for key in self.aside if first <= key < stop]
        kept = _without(block.weights, inside, 0.0)
        mass, largest = kept.sum(-1), kept.amax(-1)
        maximum_of_rest = maximum + (largest.log() + log_normalizer)
        log_of_rest = (mass / largest).log()
        far = (mass < _LEAST) & (maximum > -torch.inf)
        if bool(far.any()):
            scores = _without(block.scores[far], inside, -torch.inf)
            maximum_of_rest[far] = scores.amax(-1)
            log_of_rest[far] = (scores - scores.amax(-1, keepdim=True)).logsumexp(-1)
        log_of_rest = log_of_rest.masked_fill(maximum_of_rest == -torch.inf, 0)
        numbers = (maximum, log_normalizer, maximum_of_rest, log_of_rest)
        return (Contribution(block.box.at_rows, torch.stack(numbers, -1)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


def _without(values: Tensor, places: list[int], nothing: float) -> Tensor:
    """Return the values with `nothing` in some of their columns; leading ones are cut off."""
    cut = 0
    while cut < min(len(places), values.shape[-1] - 1) and places[cut] == cut:
        cut += 1
    rest = [place - cut for place in places[cut:]]
    values = values[..., cut:]
    return values.index_fill(-1, int_tensor(rest, values.device), nothing) if rest else values
