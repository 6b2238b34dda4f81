"""Merging of the queries, biases and masks of several calls into one attention.

Each row of the merged mask allows the same keys as in its call. The mask is recognised in blocks of
rows. Causal masks and sliding windows stay such masks, also with padding: they need no memory and
make answers fast. A mask of no known kind becomes a bool tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from regard.capture.generation import Run
from regard.capture.tensor_copies import TensorCopies
from regard.masks import Causal, Mask
from regard.masks.recognise import allowed_rows, recognised_rows
from regard.masks.row_slice import row_slice_of
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.query_key import QueryKeyScores

__all__ = ["Copies"]


@dataclass(frozen=True, eq=False)
class _Call:
    """The recorded part of one call, without its keys.

    Attributes:
        first: the position of its first query among the queries of all calls.
        query: (..., num_heads, rows, head_dim).
        mask: the mask, bound to (..., num_heads, rows, kv_len); None for all keys.
        bias: the bias, with all axes of the call's matrix; each is full or has size 1.
        base: the column of its first key.
        kv_len: the number of its keys.
    """

    first: int
    query: Tensor
    mask: Mask | None
    bias: Tensor | None
    base: int
    kv_len: int

    @property
    def rows(self) -> range:
        """Return the positions of its queries among the queries of all calls."""
        return range(self.first, self.first + self.query.shape[-2])

    def only(self, wanted: range) -> "_Call":
        """Return the part of the call with the queries at the given positions."""
        rows = self.rows
        start = min(max(wanted.start, rows.start), rows.stop) - rows.start
        stop = max(min(wanted.stop, rows.stop) - rows.start, start)
        if (start, stop) == (0, len(rows)):
            return self
        bias, mask = self.bias, self.mask
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., start:stop, :]
        if mask is not None and start < stop:
            mask = row_slice_of(mask, range(start, stop), len(rows))
        query = self.query[..., start:stop, :]
        return replace(self, first=rows.start + start, query=query, mask=mask, bias=bias)


class Copies:
    """Copies of the queries, masks and biases of the calls of one run, which holds the keys."""

    def __init__(self, run: Run, tensor_copies: TensorCopies) -> None:
        self._run = run
        self._tensor_copies = tensor_copies
        self._calls: list[_Call] = []
        self._source: QueryKeyScores | None = None

    def add(self, part: AttentionMatrix, first: int, base: int) -> None:
        """Copy the selected queries, the mask and the bias of the next call.

        Its first selected query is at ``first`` of all calls, its first key at column ``base``.
        """
        source, once = part.source, self._tensor_copies.copy_once
        assert isinstance(source, QueryKeyScores)
        query = self._tensor_copies.copy(source.query)
        mask = None if part.mask is None else part.mask.map(once)
        bias = None if source.bias is None else once(source.bias)
        if self._source is None:
            nothing = query.new_empty(0)
            without = replace(source, query=nothing, key=nothing, bias=None)
            self._source = without.map(lambda each: each if each is nothing else once(each))
        self._calls.append(_Call(first, query, mask, bias, base, part.shape[-1]))

    def matrix(self, wanted: range) -> AttentionMatrix | None:
        """Return the merged attention of the queries at some positions; None without queries."""
        calls = [part for call in self._calls if (part := call.only(wanted)).rows]
        if self._source is None or not calls:
            return None
        run, queries = self._run, [call.query for call in calls]
        # A single query tensor is already a copy. A slice of it would keep all of it alive.
        alone = len(queries) == 1 and queries[0].nbytes == queries[0].untyped_storage().nbytes()
        query = queries[0] if alone else torch.cat(queries, -2)
        mask, bias, key = calls[0].mask, calls[0].bias, run.keys
        if run.parts > 1:
            # The buffer may have room for keys that were never added.
            key = run.keys[..., : run.kv_len, :].contiguous()
            shape, once = torch.Size((*query.shape[:-1], run.kv_len)), self._tensor_copies.copy_once
            # The mask of all rows, of which some may be wanted, is of a simpler kind.
            first, count = self._calls[0].first, sum(len(call.rows) for call in self._calls)
            mask = _merged_mask(self._calls, torch.Size((*shape[:-2], count, shape[-1])))
            if mask is not None:
                start = calls[0].first - first
                mask = row_slice_of(mask, range(start, start + shape[-2]), count).map(once)
            bias = _merged_bias(calls, shape)
            bias = None if bias is None else once(bias)
        return AttentionMatrix(replace(self._source, query=query, key=key, bias=bias), mask)


def _merged_bias(calls: Sequence[_Call], shape: torch.Size) -> Tensor | None:
    """Return the merged bias; it is 0 where a call has no bias or lacks the key."""
    given = [call.bias for call in calls if call.bias is not None]
    if not given:
        return None
    leading = [max(axis) for axis in zip(*(bias.shape[:-2] for bias in given), strict=True)]
    merged, row = given[0].new_zeros(*leading, *shape[-2:]), 0
    for call in calls:
        there = merged[..., row : row + len(call.rows), call.base : call.base + call.kv_len]
        row += len(call.rows)
        if call.bias is not None:
            whole = call.bias.expand(*call.bias.shape[:-2], len(call.rows), call.kv_len)
            there.copy_(whole[..., : there.shape[-1]])
    return merged


def _merged_mask(calls: Sequence[_Call], shape: torch.Size) -> Mask | None:
    """Return the bound mask of the rows of all calls; None if every row allows every key.

    The rows are contiguous. ``shape`` is that of their matrix, (..., num_heads, rows, kv_len).
    """
    if all(call.mask is None and call.kv_len == shape[-1] for call in calls):
        return None
    first = calls[0].first
    before = shape[-1] - shape[-2] - first  # the position of query 0 among the keys
    if all(_is_causal(call, call.first + before) for call in calls):
        return Causal().bind(shape, calls[0].query.device)
    sizes = [_allowed(call, range(1), shape).shape[:-2] for call in calls]
    leading = cast(torch.Size, torch.broadcast_shapes((1,) * (len(shape) - 2), *sizes))

    def allowed(rows: slice) -> Tensor:
        blocks: list[Tensor] = []
        for call in calls:
            skipped = call.first - first
            start, stop = max(rows.start - skipped, 0), min(rows.stop - skipped, len(call.rows))
            if start < stop:
                block = _allowed(call, range(start, stop), shape)
                blocks.append(block.expand(*leading, *block.shape[-2:]))
        return torch.cat(blocks, -2)

    return recognised_rows(allowed, torch.Size((*leading, *shape[-2:])), shape)


def _is_causal(call: _Call, position: int) -> bool:
    """Return True if a call's mask is that of its rows in a causal mask of all keys.

    Its first query has this position among the keys.
    """
    rows = len(call.rows)
    is_causal = rows == 1 if call.mask is None else call.mask == Causal()
    return is_causal and call.base == 0 and call.kv_len == position + rows


def _allowed(call: _Call, rows: range, shape: torch.Size) -> Tensor:
    """Return True for each key that rows of a call may attend to, (..., rows, kv_len).

    The columns are the keys of all calls.
    """
    size = torch.Size((*call.query.shape[:-1], call.kv_len))
    block = allowed_rows(call.mask, slice(rows.start, rows.stop), size, call.query.device)
    whole = block.new_zeros(*block.shape[:-1], shape[-1])
    there = whole[..., call.base : call.base + call.kv_len]
    there.copy_(block[..., : there.shape[-1]])
    return whole
