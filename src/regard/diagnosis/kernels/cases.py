"""The inputs that a kernel is tried on: each of them has broken kernels of others."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.diagnosis.kernels.standard import Standard

__all__ = ["HEAD_DIM", "Case", "Inputs", "cases_of", "inputs_of"]

HEAD_DIM = 64
_BATCH = 2
_HIDDEN_KEYS = 7
"""The number of last keys that are NaN."""
_SHARP = 5.0
_EQUAL = 100.0
"""A score whose exponential is infinite in float32, 16 bits included."""

Kind = Literal["random", "sharp", "equal", "nan keys"]


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        words: what is special about it, to stand behind "with".
        q_len: the number of queries.
        kv_len: the number of keys.
        kind: the numbers in it.
        kv_heads: the number of heads of keys; None: that of the spec.
        is_view: the tensors are views of (batch, tokens, heads, head_dim).
        has_gradient: the gradients of query, key and value are compared, too.
    """

    words: str
    q_len: int
    kv_len: int
    kind: Kind = "random"
    kv_heads: int | None = None
    is_view: bool = False
    has_gradient: bool = False


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one case, rounded to the dtype of the kernel.

    Attributes:
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, kv_len, head_dim).
        value: the same shape.
        upstream: the gradient of the output, in the shape of the query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Inputs":
        """Return copies of another device or dtype that share nothing with these."""
        tensors = (self.query, self.key, self.value, self.upstream)
        return Inputs(*(t.detach().to(device, dtype, copy=True) for t in tensors))


def cases_of(standard: Standard, *, has_heads: bool, kv_heads: int | None) -> Iterator[Case]:
    """Yield the inputs to try, a plain one first.

    Args:
        standard: the attention that they are for.
        has_heads: the kernel takes an axis of heads.
        kv_heads: the number of heads of keys where it is given; None: fewer ones are tried.
    """
    yield Case("128 tokens", 128, 128)
    yield Case("77 tokens", 77, 77, has_gradient=True)
    yield Case("129 tokens", 129, 129)
    yield Case("one token", 1, 1)
    yield Case("sharp scores", 77, 77, "sharp", has_gradient=True)
    yield Case("equal scores", 65, 65, "equal")
    yield Case("5 queries and 133 keys", 5, 133, has_gradient=True)
    yield Case("133 queries and 77 keys", 133, 77, has_gradient=True)
    if standard.mask is not None:
        yield Case("masked keys that are NaN", 77, 77, "nan keys")
    if has_heads and kv_heads is None:
        yield Case("2 heads of keys", 77, 77, kv_heads=2, has_gradient=True)
    yield Case("inputs that are not contiguous", 77, 77, is_view=True, has_gradient=True)


def inputs_of(
    case: Case, dtype: torch.dtype, *, batch: int = _BATCH, heads: int, kv_heads: int
) -> Inputs:
    """Return the tensors of a case on the CPU."""
    generator = torch.Generator().manual_seed(case.q_len * 1000 + case.kv_len)

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(batch, heads, tokens, HEAD_DIM, generator=generator)

    query, upstream = normal(heads, case.q_len), normal(heads, case.q_len)
    key, value = normal(kv_heads, case.kv_len), normal(kv_heads, case.kv_len)
    if case.kind == "sharp":
        query = query * _SHARP
    elif case.kind == "equal":
        each = (_EQUAL / HEAD_DIM**0.5) ** 0.5  # of both, so that query · key / 8 is _EQUAL
        query, key = torch.full_like(query, each), torch.full_like(key, each)
    elif case.kind == "nan keys":
        key[..., -_HIDDEN_KEYS:, :] = torch.nan
    return Inputs(*(t.to(dtype) for t in (query, key, value, upstream)))
