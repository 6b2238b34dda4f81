"""The results of every kernel in plain PyTorch on the dense matrix, in any dtype.

In float64 they are the reference that kernels are compared with. They share only the operands with
the kernels, no code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.triton.operands import Derivative, Limits, MatrixNumbers, Operands
from regard.backends.triton.packed_mask import SIDE, WHOLE, PackedMask

__all__ = [
    "Rows",
    "Spans",
    "allowed",
    "column_sums",
    "derivative_by_weights",
    "gradients",
    "row_products",
    "rows",
    "scores",
    "spans",
    "top",
    "transposed_product",
    "unpacked",
    "weights",
]

Spans = list[tuple[int, int]]


class Rows(NamedTuple):
    """Statistics of each row, each (batch, num_heads, q_len)."""

    logsumexp: Tensor
    maximum: Tensor
    mean_shifted: Tensor  # sum of weights * (scores - maximum)
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
    if limits.packed is not None:
        found &= unpacked(limits.packed)
    return found


def derivative_by_weights(
    given: Operands, of: Derivative, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return what a derivative says of each weight: G, and the numbers of its row."""
    of_all = weights(given, dtype)
    found = of.offset.to(dtype)[..., None] + torch.zeros_like(of_all)
    if of.slope is not None:
        found = found + of.slope.to(dtype)[..., None] * of_all.clamp(min=2.0**-200).log()
    return found + _of_places(given, of, dtype) + _of_product(given, of, dtype)


def _of_places(given: Operands, of: Derivative, dtype: torch.dtype) -> Tensor:
    found = torch.zeros(given.shape, dtype=dtype, device=given.query.device)
    if of.columns is not None:
        found = found + of.columns.to(dtype)[..., None, :]
    if of.grid is not None:
        rows, columns = (each.long() for each in of.grid.places)
        numbers = of.grid.numbers.to(dtype)
        cells = numbers[..., rows.clamp(min=0), :][..., columns.clamp(min=0)]
        found = found + cells * (rows >= 0)[:, None] * (columns >= 0)
    return found


def _of_product(given: Operands, of: Derivative, dtype: torch.dtype) -> Tensor:
    if of.left is None or of.right is None:
        return torch.zeros((), dtype=dtype, device=given.query.device)
    left = of.left.to(dtype).repeat_interleave(given.shape[1] // of.left.shape[1], 1)
    return left @ of.right.to(dtype).mT


def row_products(
    given: Operands, of: Derivative, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Compute what ``row_products_kernel`` does: row sums of W G, and the product W @ right."""
    of_all = weights(given, dtype)
    assert of.right is not None
    by_weight = _of_places(given, of, dtype) + _of_product(given, of, dtype)
    return (of_all * by_weight).sum(-1), of_all @ of.right.to(dtype)


def gradients(
    given: Operands, of: Derivative, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Compute what the gradient kernels do: the gradients of query and key."""
    by_score = weights(given, dtype) * derivative_by_weights(given, of, dtype)
    if given.softcap is not None:
        of_all = scores(given, dtype)
        of_all = of_all.masked_fill(of_all == -torch.inf, 0)
        by_score = by_score * (1 - (of_all / given.softcap).square())
    if of.keys is not None and of.numbers is not None:
        at = of.keys.clamp(min=0)
        by_score = by_score.scatter_add(-1, at, of.numbers.to(dtype) * (of.keys >= 0))
    query, key = given.query.to(dtype), given.key.to(dtype)
    of_query = given.scale * by_score @ key.repeat_interleave(given.group, 1)
    of_key = given.scale * by_score.mT @ query
    groups = (given.shape[0], key.shape[1], given.group, *key.shape[-2:])
    return of_query, of_key.reshape(groups).sum(2)


def unpacked(packed: PackedMask) -> Tensor:
    """Return the bits of a packed mask, (batch or 1, num_heads or 1, q_len, kv_len), on the CPU."""
    slots, words = packed.slots.cpu(), packed.words.cpu()
    bits = (words[..., None] >> torch.arange(32, device="cpu")) & 1  # (places, SIDE, SIDE / 32, 32)
    kinds = torch.zeros(2, SIDE, SIDE, dtype=torch.bool, device="cpu")
    kinds[WHOLE] = True
    squares = torch.cat((bits.bool().view(-1, SIDE, SIDE), kinds))[slots]
    visible = squares.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    q_len, kv_len = packed.lengths
    return visible[..., :q_len, :kv_len]


def scores(given: Operands, dtype: torch.dtype = torch.float64) -> Tensor:
    """All scores, (batch, num_heads, q_len, kv_len); -inf where a key is masked."""
    key = given.key.repeat_interleave(given.group, 1)
    found = given.query.to(dtype) @ key.to(dtype).mT * given.scale
    if given.bias is not None:
        found = found + _dense(given.bias, given.shape).to(dtype)
    if given.softcap is not None:
        found = given.softcap * torch.tanh(found / given.softcap)
    return found.masked_fill(~allowed(given.limits, given.shape).to(found.device), -torch.inf)


def _dense(given: MatrixNumbers, shape: torch.Size) -> Tensor:
    if not given.diagonal:
        return given.numbers
    q_idx, kv_idx = (
        torch.arange(shape[-2], device="cpu")[:, None],
        torch.arange(shape[-1], device="cpu"),
    )
    return given.numbers[..., shape[-2] - 1 - q_idx + kv_idx]


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
    largest = found.amax(-1, keepdim=True)
    return Rows(
        _logsumexp(given, found),
        largest.squeeze(-1),
        torch.where(found == -torch.inf, 0, of_all * (found - largest)).sum(-1),
        of_all.sum(-1),
        value,
        index,
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
