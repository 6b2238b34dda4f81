"""Merging of the queries, biases and masks of several calls into one attention.

Each row of the merged mask allows the same keys as in its call. Causal masks and sliding windows
stay such masks, also with padding: they need no memory and make answers fast. Any other mask
becomes a bool tensor with an element for each query and key.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.capture.generation import Run
from regard.capture.tensor_copies import TensorCopies
from regard.masks import And, Causal, Keep, Mask, SlidingWindow
from regard.masks.bands import Band
from regard.masks.row_slice import row_slice_of
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.box import Box
from regard.scores.query_key import QueryKeyScores

__all__ = ["Copies"]

_ROWS = 1024  # the number of rows of a mask in one block


@dataclass(frozen=True, eq=False)
class _Call:
    """The recorded part of one call, without its keys.

    Attributes:
        first: the position of its first query among the queries of all calls.
        query: the queries, (..., num_heads, rows, head_dim).
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
    """Copies of the queries, masks and biases of the calls of one run.

    Args:
        run: the run; it holds the keys of all calls.
        tensor_copies: makes the copies.
    """

    def __init__(self, run: Run, tensor_copies: TensorCopies) -> None:
        self._run = run
        self._tensor_copies = tensor_copies
        self._calls: list[_Call] = []
        self._source: QueryKeyScores | None = None

    def add(self, part: AttentionMatrix, first: int, base: int) -> None:
        """Copy the queries, mask and bias of the next call.

        Args:
            part: the selected queries of the call.
            first: the position of the first of them among the queries of all calls.
            base: the column of the call's first key.
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
            mask = _merged_mask(calls, shape, run.q_len)
            mask = None if mask is None else mask.map(once)
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


def _merged_mask(calls: Sequence[_Call], shape: torch.Size, q_len: int) -> Mask | None:
    """Return the bound mask of the rows of all calls; None if every row allows every key.

    Args:
        calls: the calls in the order of their rows, which are contiguous.
        shape: the shape of the merged matrix, (..., num_heads, rows, kv_len).
        q_len: the number of queries that ran, recorded or not.
    """
    rows = range(calls[0].rows.start, calls[-1].rows.stop)
    for band in _bands(calls, shape, q_len):
        if any(_is_band(call, band, shape, q_len) is False for call in calls):
            continue
        columns = _visible_keys(calls, band, shape, q_len)
        if all(_agrees(call, band, columns, shape, q_len) for call in calls):
            hidden = [] if bool(columns.all()) else [Keep(columns)]
            masks = hidden if band is None else [band, *hidden]
            mask = And(*masks) if len(masks) == 2 else next(iter(masks), None)
            return None if mask is None else row_slice_of(mask, rows, q_len)
    blocks = [_allowed(call, range(len(call.rows)), shape) for call in calls]
    blocks = [block[(None,) * (len(shape) - block.ndim)] for block in blocks]
    leading = [max(axis) for axis in zip(*(block.shape[:-2] for block in blocks), strict=True)]
    whole = [block.expand((*leading, *block.shape[-2:])) for block in blocks]
    return Keep(torch.cat(whole, -2))


def _bands(calls: Sequence[_Call], shape: torch.Size, q_len: int) -> Iterator[Band | None]:
    """Yield the possible bands of the merged mask, the simplest first; None is no band."""
    yield None
    yield Causal()
    lefts = [0]
    for call in calls:
        last = len(call.rows) - 1
        seen = _allowed(call, range(last, last + 1), shape).flatten(0, -2).any(0).nonzero()
        if len(seen):
            lefts.append(call.rows[last] + shape[-1] - q_len - int(seen[0]))
    yield SlidingWindow(max(lefts), 0)


def _visible_keys(
    calls: Sequence[_Call], band: Band | None, shape: torch.Size, q_len: int
) -> Tensor:
    """Return a bool tensor (..., 1, kv_len) that is False for each key hidden by padding.

    Such a key is in the band of some row, and no row may attend to it.
    """
    device = calls[0].query.device
    seen = torch.zeros(1, shape[-1], dtype=torch.bool, device=device)
    reached = seen.clone()
    for call in calls:
        if _is_band(call, band, shape, q_len):
            seen = seen | _unhidden(call, shape)
            reached = reached.index_fill(-1, _columns(call, shape), True)
            continue
        for rows in _blocks(call):
            seen = seen | _allowed(call, rows, shape).any(-2, keepdim=True)
            reached = reached | _band_rows(call, rows, band, shape, q_len).any(-2, keepdim=True)
    columns = seen | ~reached
    return columns[(None,) * (len(shape) - columns.ndim)]


def _agrees(call: _Call, band: Band | None, columns: Tensor, shape: torch.Size, q_len: int) -> bool:
    """Return True if each row of a call allows exactly the visible keys of the band."""
    if _is_band(call, band, shape, q_len):
        others = columns & ~_unhidden(call, shape)
        return not bool(others.index_select(-1, _columns(call, shape)).any())
    for rows in _blocks(call):
        expected = _band_rows(call, rows, band, shape, q_len) & columns
        allowed = _allowed(call, rows, shape)
        if bool((expected ^ allowed).any()):
            return False
    return True


def _is_band(call: _Call, band: Band | None, shape: torch.Size, q_len: int) -> bool | None:
    """Return True if a call's mask is the band, apart from hidden keys, and False if it is not.

    The result is None if the kind of the mask does not decide it: then its rows must be compared.
    """
    known, count = _of_kind(call.mask), len(call.rows)
    place, end = call.first + shape[-1] - q_len, call.base + call.kv_len
    if known is None or end - count != place:
        return None
    if band is None and end < shape[-1]:
        return False
    reach = band.left if isinstance(band, SlidingWindow) else shape[-1]
    first = max(0, place - reach)
    if count == 1 and known[0] in (None, Causal()):
        return call.base == first
    # A window equals a causal mask if no row of the call has more keys than the window.
    same = known[0] == (Causal() if band is not None and end - 1 <= reach else band)
    return same and call.base <= first


def _unhidden(call: _Call, shape: torch.Size) -> Tensor:
    """Return True for each key of a call that is not hidden, (..., 1, kv_len)."""
    known = _of_kind(call.mask)
    columns = None if known is None else known[1]
    visible = torch.zeros(1, shape[-1], dtype=torch.bool, device=call.query.device)
    if columns is not None:
        visible = visible.expand(*columns.shape[:-1], shape[-1]).clone()
    visible[..., call.base : call.base + call.kv_len] = True if columns is None else columns
    return visible


def _of_kind(mask: Mask | None) -> tuple[Band | None, Tensor | None] | None:
    """Split a mask into its band and its visible keys; None if it is another kind of mask."""
    match mask:
        case None:
            return None, None
        case Causal(align="bottom-right") | SlidingWindow(right=0):
            return mask, None
        case Keep(allowed) if allowed.shape[-2] == 1:
            return None, allowed
        case And(Band() as band, Keep(allowed)) if allowed.shape[-2] == 1:
            known = _of_kind(band)
            return None if known is None else (known[0], allowed)
        case _:
            return None


def _blocks(call: _Call) -> Iterator[range]:
    """Yield the rows of a call in blocks, so that the whole mask is never formed."""
    count = len(call.rows)
    return (range(i, min(i + _ROWS, count)) for i in range(0, count, _ROWS))


def _columns(call: _Call, shape: torch.Size) -> Tensor:
    """Return the columns of the keys of a call."""
    stop = min(call.base + call.kv_len, shape[-1])
    return torch.arange(call.base, stop, device=call.query.device)


def _allowed(call: _Call, rows: range, shape: torch.Size) -> Tensor:
    """Return True for each key that rows of a call may attend to, (..., rows, kv_len).

    The columns are the keys of all calls.
    """
    size, device = (*call.query.shape[:-1], call.kv_len), call.query.device
    if call.mask is None:
        block = torch.ones(len(rows), call.kv_len, dtype=torch.bool, device=device)
    else:
        everywhere = tuple(slice(0, n) for n in size)
        box = Box(everywhere[:-2], slice(rows.start, rows.stop), everywhere[-1])
        block = call.mask.block(box, torch.Size(size), device)
        block = block.expand(*block.shape[:-2], len(rows), call.kv_len)
    whole = block.new_zeros(*block.shape[:-1], shape[-1])
    there = whole[..., call.base : call.base + call.kv_len]
    there.copy_(block[..., : there.shape[-1]])
    return whole


def _band_rows(
    call: _Call, rows: range, band: Band | None, shape: torch.Size, q_len: int
) -> Tensor:
    """Return True for each key that a band allows for rows of a call, (rows, kv_len)."""
    device = call.query.device
    if band is None:
        return torch.ones(len(rows), shape[-1], dtype=torch.bool, device=device)
    size = torch.Size((*shape[:-2], q_len, shape[-1]))
    start = call.first + rows.start
    leading = tuple(slice(0, n) for n in size[:-2])
    box = Box(leading, slice(start, start + len(rows)), slice(0, shape[-1]))
    block = band.block(box, size, device)
    return block.reshape(-1, *block.shape[-2:])[0].expand(len(rows), shape[-1])
