"""The results of every kernel in plain PyTorch on the dense matrix, in any dtype.

In float64 they are the reference that kernels are compared with. They share only the operands with
the kernels, no code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.triton.operands import Limits, Operands, Plane

__all__ = [
    "Rows",
    "Spans",
    "allowed",
    "column_sums",
    "rows",
    "scores",
    "spans",
    "top",
    "transposed_product",
    "weights",
]

Spans = list[tuple[int, int]]


class Rows(NamedTuple):
    """Statistics of each row, each (batch, num_heads, q_len)."""

    logsumexp: Tensor
    entropy: Tensor
    mass: Tensor
    value: Tensor
    key: Tensor


def allowed(limits: Limits, shape: torch.Size) -> Tensor:
    """Return True where a query may attend to a key, in the shape of the matrix, on the CPU."""
    q_idx, kv_idx = (
        torch.arange(shape[-2], device="cpu")[:, None],
        torch.arange(shape[-1], device="cpu"),
    )
    found = torch.ones(shape, dtype=torch.bool, device="cpu")
    if limits.low is not None:
        found &= kv_idx - q_idx >= limits.low
    if limits.high is not None:
        found &= kv_idx - q_idx <= limits.high
    if limits.lengths is not None:
        found &= kv_idx < limits.lengths[..., None, None].cpu()
    if limits.first is not None:
        position = q_idx + limits.shift
        first = limits.first.cpu()
        found &= (position >= 0) & (first[..., position.clamp(min=0)] == first[..., None, :])
    if limits.keep is not None:
        found &= limits.keep.cpu()
    return found


def scores(given: Operands, dtype: torch.dtype = torch.float64) -> Tensor:
    """All scores, (batch, num_heads, q_len, kv_len); -inf where a key is masked."""
    key = given.key.repeat_interleave(given.group, 1)
    found = given.query.to(dtype) @ key.to(dtype).mT * given.scale
    if given.bias is not None:
        found = found + _dense(given.bias, given.shape).to(dtype)
    if given.softcap is not None:
        found = given.softcap * torch.tanh(found / given.softcap)
    return found.masked_fill(~allowed(given.limits, given.shape).to(found.device), -torch.inf)


def _dense(plane: Plane, shape: torch.Size) -> Tensor:
    if not plane.diagonal:
        return plane.numbers
    q_idx, kv_idx = (
        torch.arange(shape[-2], device="cpu")[:, None],
        torch.arange(shape[-1], device="cpu"),
    )
    return plane.numbers[..., shape[-2] - 1 - q_idx + kv_idx]


def weights(given: Operands, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the softmax of the scores and the sink; 0 in a row without keys."""
    found = scores(given, dtype)
    return torch.where(found == -torch.inf, 0, (found - _logsumexp(given, found)[..., None]).exp())


def _logsumexp(given: Operands, found: Tensor) -> Tensor:
    of_keys = found.logsumexp(-1)
    if given.sink is None:
        return of_keys
    with_sink = torch.logaddexp(of_keys, given.sink[..., None].to(found.dtype))
    return torch.where(of_keys == -torch.inf, of_keys, with_sink)


def rows(given: Operands, dtype: torch.dtype = torch.float64) -> Rows:
    """Compute what ``rows_kernel`` does; ties of the largest weight go to the lowest index."""
    found, of_all = scores(given, dtype), weights(given, dtype)
    value, index = of_all.max(-1)
    first = (found == found.amax(-1, keepdim=True)).int().argmax(-1)
    empty = (found == -torch.inf).all(-1)
    index = torch.where(empty, -1, first)
    return Rows(
        _logsumexp(given, found), torch.special.entr(of_all).sum(-1), of_all.sum(-1), value, index
    )


def column_sums(given: Operands, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute what ``columns_kernel`` does: (batch, num_heads, kv_len)."""
    return weights(given, dtype).sum(-2)


def transposed_product(
    given: Operands, operand: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Compute ``columns_kernel`` with an operand: (batch, num_heads, kv_len, width)."""
    group = given.shape[1] // operand.shape[1]
    return weights(given, dtype).mT @ operand.to(dtype).repeat_interleave(group, 1)


def spans(
    given: Operands, of_rows: Spans, of_columns: Spans, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Compute what ``pooled_kernel`` does: (batch, num_heads, row spans, column spans)."""
    found = weights(given, dtype)
    by_row = torch.stack([found[..., start:stop, :].sum(-2) for start, stop in of_rows], -2)
    return torch.stack([by_row[..., start:stop].sum(-1) for start, stop in of_columns], -1)


def top(given: Operands, k: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Compute what ``top_kernel`` does: falling weights, and their keys; -1 for missing keys."""
    found = scores(given, dtype)
    in_order = found.sort(dim=-1, descending=True, stable=True)
    masked = in_order.values[..., :k] == -torch.inf
    indices = in_order.indices[..., :k]
    values = weights(given, dtype).gather(-1, indices)
    return values, indices.masked_fill(masked, -1)
