"""What turns the scores of a row into weights: with it any weight is one product and one exp."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.box import int_tensor

__all__ = ["RowNumbers"]

_LEAST = 1e-30  # what is left of a row in float32 is exact down to 1e-38


@final
@dataclass(frozen=True)
class RowNumbers(Reduction):
    """The logsumexp of each row and its highest weight, with all keys and without some of them.

    The answer has shape (..., num_heads, q_len, 4): logsumexp and highest weight, then both of the
    row renormalised without the keys set aside, the sinks. A row without keys has -inf and 0. It is
    float32 (float64 of such inputs): in float16 a logsumexp of 20 is 0.008 off at the most, and so
    each of its weights by 0.8 % of itself, three digits less than float32 gives.

    Args:
        aside: positions of the keys that are set aside.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.row_normalizers import RowNumbers
        >>> A = regard.AttentionMatrix.from_weights(torch.tensor([[0.5, 0.25, 0.25]]))
        >>> A.reduce(RowNumbers((0,)))  # half of the row is left, and of that half
        tensor([[ 0.0000,  0.5000, -0.6931,  0.5000]])
    """

    aside: tuple[int, ...]

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(*shape[:-1], 4, dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        logsumexp = block.logsumexp
        highest = (-block.log_normalizer).exp().masked_fill(logsumexp == -torch.inf, 0)
        first, stop = block.box.columns.start, block.box.columns.stop
        inside = [key - first for key in self.aside if first <= key < stop]
        kept = _without(block.weights, inside, 0.0)
        mass, largest = kept.sum(-1), kept.amax(-1)
        rest = logsumexp + mass.log()
        highest_of_rest = (largest / mass).masked_fill(mass == 0, 0)
        far = (mass < _LEAST) & (logsumexp > -torch.inf)
        if bool(far.any()):
            scores = _without(block.scores[far], inside, -torch.inf)
            rest[far] = scores.logsumexp(-1)
            highest_of_rest[far] = (scores.amax(-1) - rest[far]).exp().nan_to_num(0.0)
        numbers = torch.stack((logsumexp, highest, rest, highest_of_rest), -1)
        return (Contribution(block.box.at_rows, numbers),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


def _without(values: Tensor, places: list[int], nothing: float) -> Tensor:
    """The values with `nothing` in some of their columns; those at the beginning are cut off."""
    cut = 0
    while cut < min(len(places), values.shape[-1] - 1) and places[cut] == cut:
        cut += 1
    rest = [place - cut for place in places[cut:]]
    values = values[..., cut:]
    return values.index_fill(-1, int_tensor(rest, values.device), nothing) if rest else values
