"""Where scores come from: query·key with a scale and a bias, or given numbers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.grouped import group_size, grouped_matmul, kv_leading, select_kv
from regard.indexing import Box, Cut, Index, narrow

__all__ = ["Given", "QueryKey", "Scores", "accumulation_dtype"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores and statistics are computed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Scores(ABC):
    """The numbers before mask and softmax, (..., num_heads, q_len, kv_len), block by block."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(..., num_heads, q_len, kv_len)."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that gradients flow to."""

    @abstractmethod
    def select(self, index: Index) -> "Scores":
        """The scores of a part of the leading axes; a view where PyTorch has one."""

    @abstractmethod
    def block(self, box: Box, cut: Cut, out: Tensor | None = None) -> Tensor:
        """The scores of one box, in the accumulation dtype: a new tensor, or in ``out``."""

    @abstractmethod
    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        """A logit that stands in the denominator of the softmax beside the keys' scores.

        Broadcastable to (..., rows, 1) of the box, in the accumulation dtype; None: there is none.
        """

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Scores":
        """The same scores with the function applied to every tensor."""

    @property
    def group(self) -> int:
        """How many neighbouring heads are cheapest when computed together."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.tensors[0].device


@dataclass(frozen=True, eq=False)
class QueryKey(Scores):
    """scale · query·key + bias.

    Attributes:
        query: (..., num_heads, q_len, head_dim).
        key: (..., num_kv_heads, kv_len, head_dim); the batch axes equal the query's.
        scale: multiplies query·key.
        bias: numbers added to the scaled scores; every axis of the matrix, each full or 1.
    """

    query: Tensor
    key: Tensor
    scale: float
    bias: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.query.shape[:-1], self.key.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.query, self.key) if self.bias is None else (self.query, self.key, self.bias)

    @property
    def group(self) -> int:
        return group_size(self.query.shape[:-2], self.key)

    def select(self, index: Index) -> "QueryKey":
        num_heads = self.query.shape[-3] if self.query.ndim > 2 else 1
        bias = None if self.bias is None else narrow(self.bias, index)
        key = select_kv(self.key, index, num_heads)
        return QueryKey(self.query[index], key, self.scale, bias)

    def block(self, box: Box, cut: Cut, out: Tensor | None = None) -> Tensor:
        dtype = accumulation_dtype(self.query.dtype)
        leading = kv_leading(box.leading, self.group)
        query = cut(self.query, box.at_rows).to(dtype) * self.scale
        key = cut(self.key, (*leading, box.columns)).to(dtype)
        scores = grouped_matmul(query, key.mT, out)
        if self.bias is not None:
            scores = torch.add(scores, cut(self.bias, box.at_both).to(dtype), out=out)
        return scores

    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        return None

    def map(self, function: Callable[[Tensor], Tensor]) -> "QueryKey":
        bias = None if self.bias is None else function(self.bias)
        return QueryKey(function(self.query), function(self.key), self.scale, bias)


@dataclass(frozen=True, eq=False)
class Given(Scores):
    """Scores that somebody computed already, or the logarithms of weights.

    Attributes:
        values: (..., num_heads, q_len, kv_len).
        are_weights: whether the values are weights, so that the scores are their logarithms.
    """

    values: Tensor
    are_weights: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def select(self, index: Index) -> "Given":
        return Given(self.values[index], self.are_weights)

    def block(self, box: Box, cut: Cut, out: Tensor | None = None) -> Tensor:
        values = cut(self.values, box.at_both)
        if self.are_weights:
            values = values.to(accumulation_dtype(values.dtype))
            zero = values == 0  # its gradient is 0, not 0 times infinity
            values = values.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)
        if out is not None:
            return out.copy_(values)
        return values.to(accumulation_dtype(self.values.dtype), copy=True)

    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        return None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Given":
        return Given(function(self.values), self.are_weights)
