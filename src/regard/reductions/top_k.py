"""The largest weights of each row and the keys they belong to."""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from regard.errors import check_count, check_memory
from regard.reductions.block import RowStatistics
from regard.reductions.needs import Needs
from regard.reductions.reduction import Contribution, Reduction


class Top(NamedTuple):
    """The largest weights of each row and the keys they belong to.

    Attributes:
        values: weights, in falling order.
        indices: int64 positions of the keys. If a row may attend to fewer than k keys, the rest of
            its indices are -1, with weight 0. They are -1, with weight NaN, if a score is NaN or
            +inf.

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
    by_heads = by_rows = True

    k: int

    def __post_init__(self) -> None:
        check_count("k", self.k)

    @property
    def needs(self) -> Needs:
        return Needs(k=self.k)

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

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        values, indices = block.top(self.k)
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
