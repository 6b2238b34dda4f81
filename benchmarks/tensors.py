"""The tensors that all sides get."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HEAD_DIM", "Inputs", "random_inputs"]

HEAD_DIM = 64


class Inputs(NamedTuple):
    """Query, key and value, each (1, num_heads, tokens, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def tokens(self) -> int:
        """The length."""
        return self.query.shape[-2]


def random_inputs(
    tokens: int,
    num_heads: int,
    sharpness: float = 1,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Random tensors, the same on every run; sharpness multiplies the scores."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, num_heads, tokens, HEAD_DIM)
    return Inputs(*(tensor.to(dtype) for tensor in (query * sharpness, key, value)))
