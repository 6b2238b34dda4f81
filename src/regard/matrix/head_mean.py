"""The lazy mean of an attention matrix over its heads."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import DENSE_LIMIT, check_memory
from regard.matrix.indexing import parse_index
from regard.matrix.linear_map import LinearMap
from regard.scores.score_source import accumulation_dtype

if TYPE_CHECKING:
    from regard.matrix.attention_matrix import AttentionMatrix


class HeadMean(LinearMap):
    """The mean of an attention matrix over its heads, ``A.mean(1)``.

    Index it and multiply it as the matrix itself. It is not a softmax of scores, so that it has no
    entropy and no logsumexp.

    Attributes:
        of: the matrix, (..., num_heads, q_len, kv_len).

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> A = regard.attend(x, x, mask=regard.Causal())
        >>> A.mean(1)[0, 1]
        tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(self, of: "AttentionMatrix") -> None:
        self.of = of

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.of.shape[:-3], *self.of.shape[-2:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def device(self) -> torch.device:
        return self.of.device

    def __getitem__(self, key: Any) -> Any:
        """Return a HeadMean if the index keeps all rows and columns, else a tensor of weights."""
        asked = parse_index(key, self.shape)
        heads: Any = self.of[(*asked.leading, ...)]
        if asked.whole:
            return HeadMean(heads)
        part = heads[(..., *(slice(each.start, each.stop, each.step) for each in asked.ranges))]
        return asked.drop_axes(part.mean(-3))

    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        check_memory("to_dense()", self.shape, self.dtype, limit)
        # A tensor without axes would leave the sum in the dtype of the weights.
        wide, num_heads = accumulation_dtype(self.dtype), self.of.shape[-3]
        total = torch.zeros(self.shape, dtype=wide, device=self.device)
        for head in range(num_heads):
            one: Any = self.of[(*(slice(None),) * (self.of.ndim - 3), head)]
            total = total + one.to_dense(limit=limit)
        return (total / num_heads).to(self.dtype)

    def _times(self, value: Tensor) -> Tensor:
        return _over_heads(self.of.__matmul__, value)

    def _transposed_times(self, operand: Tensor) -> Tensor:
        return _over_heads(self.of.T.__matmul__, operand)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"HeadMean(of {self.of!r})"


def _over_heads(times: Callable[[Tensor], Tensor], operand: Tensor) -> Tensor:
    """Return the mean of the products with one operand for all heads."""
    return times(operand).mean(-2) if operand.ndim == 1 else times(operand.unsqueeze(-3)).mean(-3)
