"""The two numbers of each row that turn its scores into weights."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from regard.reductions.block import RowStatistics
from regard.reductions.needs import Needs
from regard.reductions.products import intersect
from regard.reductions.reduction import Contribution, Reduction


@final
@dataclass(frozen=True)
class RowNormalizers(Reduction):
    """The maximum and the log-normalizer of each row.

    weight = exp((score - maximum) - log_normalizer), where the maximum is the largest score of the
    row, and the log-normalizer the log of the sum of exp(score - maximum). Where scores are large,
    their sum, the logsumexp, would round the log-normalizer away.

    The answer has shape (..., num_heads, rows, 2). A row without keys has -inf and 0. It is
    float32, or float64 of such inputs.

    Args:
        at_rows: the queries, in rising order; all of them when left out.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.row_normalizers import RowNormalizers
        >>> A = regard.AttentionMatrix.from_scores(torch.tensor([[3.0, 2.0, 2.0]]))
        >>> A.reduce(RowNormalizers())
        tensor([[3.0000, 0.5514]])
    """

    thread_safe = True

    at_rows: range | None = None

    @property
    def needs(self) -> Needs:
        # ``reads_statistics`` would also have the keys of each row counted.
        return Needs(mean_shifted=True)

    def rows(self, q_len: int) -> range:
        return range(q_len) if self.at_rows is None else self.at_rows

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        size = (*shape[:-2], len(self.rows(shape[-2])), 2)
        return (torch.zeros(size, dtype=dtype, device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        rows, in_block = intersect(self.rows(block.shape[-2]), block.box.rows)
        numbers = torch.stack((block.maximum.squeeze(-1), block.log_normalizer), -1)
        return (Contribution((*block.box.leading, rows), numbers[..., in_block, :]),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Any:
        return buffers[0]
