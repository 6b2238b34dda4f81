"""The calls of one attention, merged to one matrix or to the answers of one matrix.

A model that generates text runs a layer once for each token. Each row of the merged mask allows the
same keys as in its call. The mask is recognised in blocks of rows. Causal masks and sliding windows
stay such masks, also with padding: they need no memory and make answers fast. A mask of no known
kind becomes a bool tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.masks import Causal, Mask
from regard.masks.recognise import allowed_rows, recognised_rows
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, Layer, Lazy, Queries
from regard.recording.spool import Piece, Spool
from regard.reductions.reduction import Reduction, RowStatistic
from regard.reductions.sums import Sum
from regard.reductions.top_k import Top, TopK
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores

SPILLED = (
    "rows of padding attend to slots of a static cache that no token has filled.\n"
    '    Use attn_implementation="sdpa", or a dynamic cache.'
)
"""The reason for which a layer is refused whose rows attend to keys that no call has."""


class MemoryColumns:
    """Columns (..., columns, dim) in one tensor, which grows by half when it is full.

    ``length`` is the number of columns; the last ones may be room of a cache that is not filled.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._buffer = tensor
        self.length = tensor.shape[-2]

    def append(self, first: int, more: Tensor) -> None:
        """Copy columns to the end, from column ``first`` on."""
        stop, kept = first + more.shape[-2], self._buffer
        if kept.shape[-2] < stop:
            # Growing by half keeps the cost of all copies proportional to the number of columns.
            room = stop + max(64, stop // 2)
            self._buffer = kept.new_empty((*more.shape[:-2], room, more.shape[-1]))
            self._buffer[..., :first, :] = kept[..., :first, :]
        self._buffer[..., first:stop, :] = more
        self.length = max(self.length, stop)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a range of columns."""
        return self._buffer[..., start:stop, :]

    def equal(self, start: int, other: Tensor) -> bool:
        """Return True if the columns from ``start`` on are equal to those of another tensor."""
        columns = self.read(start, start + other.shape[-2])
        return torch.equal(columns, other.to(columns.device))


class SpooledColumns:
    """Columns in pieces of a spool.

    Attributes:
        latest: the first column and the piece of what was appended last.
    """

    def __init__(self, spool: Spool | None = None) -> None:
        self.length = 0
        self.latest: tuple[int, Piece] | None = None
        self._spool = spool
        self._parts: list[tuple[int, int, Callable[[], Tensor]]] = []  # first column, columns, read

    def append(self, first: int, more: Tensor) -> None:
        """Write columns to the spool, from column ``first`` on."""
        self.latest = first, cast(Spool, self._spool).append(more)
        self.add(first, more.shape[-2], self.latest[1])

    def add(self, first: int, count: int, read: Callable[[], Tensor]) -> None:
        """Add a piece, in place of all columns from ``first`` on."""
        while self._parts and self._parts[-1][0] >= first:
            self._parts.pop()
        if self._parts:
            at, before, read_before = self._parts[-1]
            self._parts[-1] = at, min(before, first - at), read_before
        self._parts.append((first, count, read))
        self.length = max(self.length, first + count)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a range of columns."""
        parts: list[Tensor] = []
        for first, count, read in self._parts:
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                parts.append(read()[..., low:high, :])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


Columns: TypeAlias = MemoryColumns | SpooledColumns
"""The keys or values of several calls, (..., num_kv_heads, columns, dim)."""


class Extent(NamedTuple):
    """The keys and the queries of all calls of one attention.

    Attributes:
        kv_len: the number of keys.
        start: the position of the first query among the keys; 0 if they are other tokens.
        ran: the number of queries.
    """

    kv_len: int
    start: int
    ran: int

    def layer(
        self,
        name: str,
        leading: torch.Size,
        rows: range,
        q_len: int,
        matrix: Callable[[], AttentionMatrix] | None,
        answers: Answers,
    ) -> Layer:
        """Return a layer of the recorded rows, which are neighbours."""
        queries = None
        if rows != range(self.ran) or self.start:
            queries = Queries(self.start + rows.start, self.start + self.ran)
        shape = torch.Size((*leading, q_len, self.kv_len))
        return Layer(name, shape, matrix, answers, queries=queries)


@dataclass(frozen=True, eq=False)
class _Call:
    """The recorded part of one call, without its keys.

    Attributes:
        first: the position of its first query among the queries of all calls.
        shape: the shape of its matrix, (..., num_heads, rows, kv_len).
        query: a function that returns the query of its matrix.
        device: the device of the query.
        mask: the mask, bound to the shape; None for all keys.
        bias: the bias, with all axes of the matrix; each is full or has size 1.
        base: the column of its first key.
        skipped: the number of rows of the query before the first row of this part.
    """

    first: int
    shape: torch.Size
    query: Callable[[], Tensor]
    device: torch.device
    mask: Mask | None
    bias: Tensor | None
    base: int
    skipped: int = 0

    @property
    def rows(self) -> range:
        """Return the positions of its queries among the queries of all calls."""
        return range(self.first, self.first + self.shape[-2])

    @property
    def kv_len(self) -> int:
        return self.shape[-1]

    def only(self, selected: range) -> "_Call":
        """Return the part of the call with the queries at the given positions."""
        rows = self.rows
        kept = _overlap(rows, selected)
        start, stop = kept.start - rows.start, kept.stop - rows.start
        if (start, stop) == (0, len(rows)):
            return self
        bias, mask = self.bias, self.mask
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., start:stop, :]
        if mask is not None and start < stop:
            mask = mask.rows(range(start, stop), len(rows))
        shape = torch.Size((*self.shape[:-2], stop - start, self.kv_len))
        first, skipped = rows.start + start, self.skipped + start
        return replace(self, first=first, shape=shape, mask=mask, bias=bias, skipped=skipped)

    def as_weights(self, dtype: torch.dtype) -> "_Call":
        """Return the call of one key with its weights, 1 and 0 where masked, as the query."""
        visible = allowed_rows(self.mask, slice(0, self.shape[-2]), self.shape, self.device)
        if self.bias is not None:
            visible = visible & (self.bias > -torch.inf)
        weights = visible.expand(self.shape).to(dtype)
        return replace(self, query=lambda: weights, mask=None, bias=None)

    def rows_of_query(self) -> Tensor:
        query = self.query()
        # A slice of a tensor would keep all of the tensor alive.
        part = query[..., self.skipped : self.skipped + self.shape[-2], :]
        return query if part.shape == query.shape else part.clone()


class Calls:
    """The queries, masks and biases of the calls of one attention, and the keys of all calls.

    Args:
        read_keys: returns a range of the keys of all calls.
        once: a function that returns one tensor for all tensors with equal elements.
        device: the device of the copies; None for that of the calls.
    """

    def __init__(
        self,
        read_keys: Callable[[int, int], Tensor],
        once: Callable[[Tensor], Tensor],
        device: torch.device | None = None,
    ) -> None:
        self._read_keys = read_keys
        self._once = once
        self._device = device
        self._calls: list[_Call] = []
        self._source: QueryKeyScores | GivenScores | None = None

    def add(
        self, part: AttentionMatrix, first: int, base: int, query: Callable[[], Tensor]
    ) -> None:
        """Add the next call, whose mask and bias are copied.

        Args:
            part: its matrix, of the selected queries.
            first: the position of its first query among the queries of all calls.
            base: the column of its first key.
            query: a function that returns a copy of the query, or of the weights of given ones.
        """
        source = part.source
        mask = None if part.mask is None else part.mask.map(self._once)
        bias = None
        if isinstance(source, GivenScores):
            if isinstance(self._source, QueryKeyScores):  # of one key, which has the weight 1
                self._calls = [call.as_weights(source.values.dtype) for call in self._calls]
            self._source = replace(source, values=source.values.new_empty(0))
        else:
            source = cast(QueryKeyScores, source)
            bias = None if source.bias is None else self._once(source.bias)
            nothing = source.query.new_empty(0)
            without = replace(source, query=nothing, key=nothing, bias=None)
            self._source = self._source or without.map(
                lambda each: each if each is nothing else self._once(each)
            )
        device = self._device or part.device
        self._calls.append(_Call(first, part.shape, query, device, mask, bias, base))

    def layer(self, name: str, extent: Extent, selected: range) -> Layer | None:
        """Return the layer of the calls so far; None if none of their queries is selected.

        They are merged whenever its matrix is read.

        Args:
            name: the name of the layer.
            extent: the keys and queries of the calls.
            selected: the positions of the queries among the queries of all calls.
        """
        calls = tuple(self._calls)
        q_len = sum(len(call.only(selected).rows) for call in calls)
        if not q_len:
            return None
        matrix = Lazy(lambda: self._merged(calls, selected, extent.kv_len))
        return extent.layer(name, calls[0].shape[:-2], selected, q_len, matrix, Answers())

    def _merged(self, every: Sequence[_Call], selected: range, kv_len: int) -> AttentionMatrix:
        # Each call has the rows that would have been the last ones, so that gaps may be left.
        gaps = [
            index
            for index, (call, after) in enumerate(pairwise(every), 1)
            if call.rows.stop < after.first
        ]
        every = every[gaps[-1] if gaps else 0 :]
        calls = [part for call in every if (part := call.only(selected)).rows]
        queries = [call.rows_of_query() for call in calls]
        if isinstance(self._source, GivenScores):
            # The keys that a call did not have get the weight 0.
            empty = 0.0 if self._source.are_weights else -torch.inf
            wide = [
                pad(rows, (call.base, kv_len - call.base - call.kv_len), value=empty)
                for call, rows in zip(calls, queries, strict=True)
            ]
            values = wide[0] if len(wide) == 1 else torch.cat(wide, -2)
            return AttentionMatrix(replace(self._source, values=values))
        query = queries[0] if len(queries) == 1 else torch.cat(queries, -2)
        mask, bias = calls[0].mask, calls[0].bias
        key = self._read_keys(0, kv_len).contiguous()
        if len(every) > 1 or (every[0].base, every[0].kv_len) != (0, kv_len):
            shape = torch.Size((*query.shape[:-1], kv_len))
            # The mask of all rows, of which some may be selected, is of a simpler kind.
            first, count = every[0].first, sum(len(call.rows) for call in every)
            mask = _merged_mask(every, torch.Size((*shape[:-2], count, kv_len)))
            if mask is not None:
                start = calls[0].first - first
                mask = mask.rows(range(start, start + shape[-2]), count).map(self._once)
            bias = _merged_bias(calls, shape)
            bias = None if bias is None else self._once(bias)
        source = cast(QueryKeyScores, self._source)
        return AttentionMatrix(replace(source, query=query, key=key, bias=bias), mask)


def _merged_bias(calls: Sequence[_Call], shape: torch.Size) -> Tensor | None:
    """Return the merged bias; it is 0 where a call has no bias or lacks the key."""
    biases = [call.bias for call in calls if call.bias is not None]
    if not biases:
        return None
    leading = [max(axis) for axis in zip(*(bias.shape[:-2] for bias in biases), strict=True)]
    merged, row = biases[0].new_zeros(*leading, *shape[-2:]), 0
    for call in calls:
        there = merged[..., row : row + len(call.rows), call.base : call.base + call.kv_len]
        row += len(call.rows)
        if call.bias is not None:
            rows_bias = call.bias.expand(*call.bias.shape[:-2], len(call.rows), call.kv_len)
            there.copy_(rows_bias[..., : there.shape[-1]])
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
        return Causal().bind(shape, calls[0].device)
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
    block = allowed_rows(call.mask, slice(rows.start, rows.stop), call.shape, call.device)
    every = block.new_zeros(*block.shape[:-1], shape[-1])
    there = every[..., call.base : call.base + call.kv_len]
    there.copy_(block[..., : there.shape[-1]])
    return every


class CallAnswers:
    """The answers of the calls of one attention, merged to those of all calls.

    Attributes:
        reductions: the reductions that each call answers.
        totals: for each ``Sum(-2)`` among them, by its index, the sum over all calls.
        calls: the number of calls.

    Args:
        reductions: the reductions.
        queries: the selected queries. A call has answered for those that are selected if no other
            call follows.
    """

    def __init__(self, reductions: Sequence[Reduction], queries: slice) -> None:
        self.reductions = reductions
        self.totals: dict[int, Tensor] = {}
        self.calls = 0
        self._queries = queries
        self._parts: list[list[Any]] = [[] for _ in reductions]
        self._rows: list[range] = []

    def add(self, answers: Sequence[Any], rows: range, base: int) -> None:
        """Add the answers of the next call, whose first key is at column ``base``.

        ``rows`` are the positions of its queries among the queries of all calls.
        """
        self.calls += 1
        self._rows.append(rows)
        for index, (reduction, answer) in enumerate(zip(self.reductions, answers, strict=True)):
            if answer is None:
                continue  # a total that is added later
            if reduction == Sum(-2):  # one total suffices, however many calls there are
                self.totals[index] = _added(self.totals.get(index), answer, base)
            elif isinstance(answer, Top) and base:
                indices = answer.indices + base * (answer.indices >= 0)
                self._parts[index].append(Top(answer.values, indices))
            else:
                self._parts[index].append(answer)

    def skip(self) -> None:
        """Count a call of which no query is selected."""
        self.calls += 1

    def put_total(self, index: int, total: Tensor) -> None:
        """Set the sum over all calls of the ``Sum(-2)`` at an index of the reductions."""
        self.totals[index] = total

    @property
    def unmerged(self) -> list[Reduction]:
        """The reductions whose answers of several calls cannot be merged."""
        start, stop = self._queries.start or 0, self._queries.stop or 0
        if stop < 0 and self.calls > 1:  # each call has left out its own last queries
            return list(self.reductions)
        if len(self._rows) < 2:
            return []
        return [each for each in self.reductions if not _can_merge(each, from_end=start < 0)]

    def layer(self, name: str, extent: Extent, leading: torch.Size) -> Layer | None:
        """Return the layer of the merged answers, without those of ``unmerged``.

        ``leading`` are the sizes of the batch and of the heads. The result is None without answers.
        """
        if not self._rows:
            return None
        selected = range(extent.ran)[self._queries]
        rows = [_overlap(each, selected) for each in self._rows]
        unmerged = self.unmerged
        answers = Answers(
            (each, self._merged(index, extent.kv_len, rows))
            for index, each in enumerate(self.reductions)
            if each not in unmerged
        )
        return extent.layer(name, leading, selected, sum(map(len, rows)), None, answers)

    def _merged(self, index: int, kv_len: int, rows: Sequence[range]) -> Any:
        """Return the merged answer of a reduction about some rows of each call."""
        if (total := self.totals.get(index)) is not None:
            # pad() also cuts: of the static cache, the slots that no call has filled.
            return torch.nn.functional.pad(total, (0, kv_len - total.shape[-1]))
        parts = self._parts[index]
        if len(parts) == 1:
            return parts[0]
        cuts = [
            slice(kept.start - every.start, kept.stop - every.start)
            for kept, every in zip(rows, self._rows, strict=True)
        ]
        both = list(zip(parts, cuts, strict=True))
        if isinstance(self.reductions[index], TopK):
            values = torch.cat([part.values[..., cut, :] for part, cut in both], -2)
            return Top(values, torch.cat([part.indices[..., cut, :] for part, cut in both], -2))
        return torch.cat([part[..., cut] for part, cut in both], -1)


def _can_merge(reduction: Reduction, *, from_end: bool) -> bool:
    """Return True if the answers of several calls to a reduction give that of all of them.

    With ``from_end``, each call has answered for the last queries of the text so far.
    """
    if reduction == Sum(-2):
        return not from_end
    return isinstance(reduction, RowStatistic | TopK | Sum)


def _overlap(rows: range, selected: range) -> range:
    """Return the part of some rows that is selected."""
    start = min(max(rows.start, selected.start), rows.stop)
    return range(start, max(start, min(rows.stop, selected.stop)))


def _added(total: Tensor | None, answer: Tensor, base: int) -> Tensor:
    """Add the column sums of a call, whose first key is at column ``base``, to the total."""
    # A static cache has slots that later calls fill; padding may already attend to them.
    before = 0 if total is None else total.shape[-1]
    columns = max(before, base + answer.shape[-1])
    added = answer.new_zeros(*answer.shape[:-1], columns)
    if total is not None:
        added[..., :before] += total
    added[..., base : base + answer.shape[-1]] += answer
    return added
