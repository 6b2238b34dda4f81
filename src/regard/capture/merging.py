"""Merging of the calls that form one attention into one layer of the recording.

A group of calls has copies of its queries, masks and biases, or answers. Each row of the merged
mask allows the same keys as in its call. The mask is recognised in blocks of rows. Causal masks and
sliding windows stay such masks, also with padding: they need no memory and make answers fast. A
mask of no known kind becomes a bool tensor. Values are merged in the same way as keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.generation import Place, Run, extended
from regard.capture.selection import Selection
from regard.capture.slicing import some_queries
from regard.capture.tensor_copies import TensorCopies
from regard.masks import Causal, Mask
from regard.masks.recognise import allowed_rows, recognised_rows
from regard.masks.row_slice import row_slice_of
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, InMemory, Layer, Queries, asked_of
from regard.reductions.reduction import Reduction, RowStatistic
from regard.reductions.sums import Sum
from regard.reductions.top_k import Top, TopK
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores

__all__ = ["CallGroup", "Copies", "TakeValue", "Values"]

Pairs = list[tuple[Reduction, Any]]

TakeValue = Callable[[Tensor], None]
"""A function that receives the value tensor of an attention."""

_NEVER_SEEN = (
    "no product of its weights with a value was seen that tells which value is whose.\n"
    '    Write it as weights @ value over the keys, or observe with keep="qk".'
)


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

    def only(self, selected: range) -> "_Call":
        """Return the part of the call with the queries at the given positions."""
        rows = self.rows
        start = min(max(selected.start, rows.start), rows.stop) - rows.start
        stop = max(min(selected.stop, rows.stop) - rows.start, start)
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
        self._weights: GivenScores | None = None
        self._first = 0

    def add(self, part: AttentionMatrix, first: int, base: int) -> None:
        """Copy the selected queries, the mask and the bias of the next call.

        Its first selected query is at ``first`` of all calls, its first key at column ``base``.
        """
        if isinstance(part.source, GivenScores):
            kept = self._tensor_copies.copy(part.source.values)
            self._weights, self._first = replace(part.source, values=kept), first
            return
        source, once = cast(QueryKeyScores, part.source), self._tensor_copies.copy_once
        query = self._tensor_copies.copy(source.query)
        mask = None if part.mask is None else part.mask.map(once)
        bias = None if source.bias is None else once(source.bias)
        if self._source is None:
            nothing = query.new_empty(0)
            without = replace(source, query=nothing, key=nothing, bias=None)
            self._source = without.map(lambda each: each if each is nothing else once(each))
        self._calls.append(_Call(first, query, mask, bias, base, part.shape[-1]))

    def matrix(self, selected: range) -> AttentionMatrix | None:
        """Return the merged attention of the queries at some positions; None without queries."""
        if self._weights is not None:
            rows = slice(selected.start - self._first, selected.stop - self._first)
            some = AttentionMatrix(
                replace(self._weights, values=self._weights.values[..., rows, :])
            )
            return some if some.shape[-2] else None
        calls = [part for call in self._calls if (part := call.only(selected)).rows]
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
            # The mask of all rows, of which some may be selected, is of a simpler kind.
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


class Values:
    """The value of one attention, merged over its calls in the same way as its keys.

    ``trouble`` is the reason why it cannot be recorded; None without one. ``in_graph`` is the value
    of the last call as a part of autograd's graph; None without gradients.
    """

    def __init__(self, tensor_copies: TensorCopies) -> None:
        self.trouble: str | None = None
        self.in_graph: Tensor | None = None
        self._tensor_copies = tensor_copies
        self._value: Tensor | None = None
        self._place: Place | None = None
        self._shape = torch.Size()
        self._missing = False

    def expect(self, place: Place | None, shape: torch.Size) -> None:
        """Prepare for the value of the call that has just run, at this place in its run.

        ``shape`` is that of its matrix, (..., num_heads, q_len, kv_len).
        """
        if self._missing:
            self.trouble = self.trouble or _NEVER_SEEN
        self._place, self._shape, self._missing = place, shape, True

    def add(self, value: Tensor) -> None:
        """Copy the value of the last call, (..., num_kv_heads, kv_len, head_dim)."""
        if self.trouble is not None or not self._missing:
            return
        self._missing = False
        if not _fits(value, self._shape):
            self.trouble = (
                f"its value has shape {tuple(value.shape)}; its matrix has {tuple(self._shape)}.\n"
                '    Observe with keep="qk".'
            )
            return
        # All entries of a batch may share one value.
        value = value.expand(*self._shape[:-3], *value.shape[-3:])
        place = self._place
        if place is None:
            self._value = self._tensor_copies.copy(value)
        elif place.known < place.stop and self._value is not None:
            first = place.base + place.known
            more = value[..., place.known : place.stop, :]
            self._value = extended(self._value, first, more, self._tensor_copies.empty)

    def whole(self, kv_len: int) -> Tensor | None:
        """Return the merged value, (..., num_kv_heads, kv_len, head_dim).

        If the result is None, ``trouble`` is the reason.
        """
        if self._missing:
            self.trouble = self.trouble or _NEVER_SEEN
        if self.trouble is not None or self._value is None:
            return None
        # The buffer may have room for keys that were never added.
        return self._value[..., :kv_len, :].contiguous()


def _fits(value: Tensor, shape: torch.Size) -> bool:
    """Return True if a value has one vector per key, and num_kv_heads divides num_heads."""
    if value.ndim != len(shape) or value.shape[-2] != shape[-1]:
        return False
    batches = zip(value.shape[:-3], shape[:-3], strict=True)
    return all(n in (1, m) for n, m in batches) and (
        len(shape) == 2 or shape[-3] % value.shape[-3] == 0
    )


class CallGroup:
    """The recorded part of a run: copies of its queries and masks, or answers.

    ``leading`` has the sizes of the batch axes and of the axis of heads. ``copies`` and ``values``
    are None if they are not recorded. ``name`` is the name of the layer in the recording; it is
    None until a selected query has run.
    """

    def __init__(
        self,
        module: str,
        run: Run,
        selection: Selection,
        leading: torch.Size,
        copies: Copies | None,
        values: Values | None,
    ) -> None:
        self.module = module
        self.values = values
        self.name: str | None = None
        self._run = run
        self._selection = selection
        self._leading = leading
        self._copies = copies
        self._answers: list[Pairs] = []  # the answers of each call
        self._rows: list[range] = []  # the positions of the queries of these answers
        self._sums: Tensor | None = None  # the answer to Sum(-2) over all calls

    def take(self, matrix: AttentionMatrix, first: int, base: int) -> None:
        """Record the selected queries of a call: copies of them, or answers.

        The call's first query is at ``first`` of all calls, its first key at column ``base``.
        """
        # If no call can continue the run, the first call has all of its queries.
        all_there = self._copies is None or self._run.traits is None
        there = self._selection.rows(first, matrix.shape[-2], all_there=all_there)
        if there:
            part, first = some_queries(matrix, there), first + there.start
            if self._copies is not None:
                self._copies.add(part, first, base)
            else:
                self._rows.append(range(first, first + part.shape[-2]))
                pairs = _answers_to(part, self._selection.reductions, self._selection.device)
                self._answers.append([self._placed(*pair, base) for pair in pairs])

    def layer(self) -> Layer | None:
        """Return the layer of all calls so far; None if none of their queries is selected.

        The layer lacks the answers of reductions in ``unmerged``.
        """
        run = self._run
        if self._copies is not None:
            rows = self._selection.rows(0, run.q_len, all_there=True)
            matrix = self._copies.matrix(rows)
            if matrix is None:
                return None
            queries = _recorded_queries(rows, run.q_len, run.start)
            return Layer(self.module, matrix.shape, InMemory(matrix), Answers(), queries=queries)
        if not self._answers:
            return None
        left_out = [] if len(self._answers) == 1 else self.unmerged
        asked = [each for each, _ in self._answers[0]]
        answers = [(each, self._merged(each)) for each in asked if each not in left_out]
        shape = torch.Size((*self._leading, sum(map(len, self._rows)), run.kv_len))
        if run.parts == 1:
            shape = torch.Size((*shape[:-1], run.keys.shape[-2]))
        queries = _recorded_queries(_neighbours(self._rows), run.q_len, run.start)
        return Layer(self.module, shape, None, Answers(answers), queries=queries)

    def _placed(self, reduction: Reduction, answer: Any, base: int) -> tuple[Reduction, Any]:
        """Return the answer of a call with keys renumbered to their columns in the run."""
        if reduction == Sum(-2):
            # A static cache has slots that later calls fill; padding may already attend to them.
            before = 0 if self._sums is None else self._sums.shape[-1]
            columns = max(before, base + answer.shape[-1])
            total = answer.new_zeros(*answer.shape[:-1], columns)
            if self._sums is not None:
                total[..., :before] += self._sums
            total[..., base : base + answer.shape[-1]] += answer
            self._sums = answer = total
        elif isinstance(answer, Top) and base:
            answer = Top(answer.values, answer.indices + base * (answer.indices >= 0))
        return reduction, answer

    @property
    def unmerged(self) -> list[Reduction]:
        """Return the reductions whose answers of several calls cannot be merged."""
        asked = [each for each, _ in self._answers[0]] if len(self._answers) > 1 else []
        return [each for each in asked if not isinstance(each, RowStatistic | TopK | Sum)]

    def _merged(self, reduction: Reduction) -> Any:
        """Return the merged answer of all calls to a reduction."""
        parts = [Answers(pairs)[reduction] for pairs in self._answers]
        if reduction == Sum(-2):
            # pad() also cuts: of the static cache, the slots that no call has filled.
            missing = 0 if self._run.parts == 1 else self._run.kv_len - parts[-1].shape[-1]
            return torch.nn.functional.pad(parts[-1], (0, missing))
        if len(parts) == 1:
            return parts[0]
        if isinstance(reduction, TopK):
            return Top(*(torch.cat(tensors, -2) for tensors in zip(*parts, strict=True)))
        return torch.cat(parts, -1)


def _recorded_queries(rows: range | None, ran: int, start: int = 0) -> Queries | None:
    """Return the recorded queries; None if all were recorded from the first token on, or unknown.

    ``rows`` are the recorded ones among the ``ran`` queries; the first is at position ``start``.
    """
    if rows is None or (rows == range(ran) and not start):
        return None
    return Queries(start + rows.start, start + ran)


def _neighbours(parts: Sequence[range]) -> range | None:
    """Merge contiguous ranges into one; return None if there is a gap between them."""
    if any(after.start != before.stop for before, after in pairwise(parts)):
        return None
    return range(parts[0].start, parts[-1].stop)


def _answers_to(
    matrix: AttentionMatrix, reductions: Sequence[Reduction], device: torch.device | None
) -> Pairs:
    """Return each reduction with its answer, on the device; None is the device of the matrix."""
    answers = asked_of(matrix, reductions)
    return [(each, _at(answer, device)) for each, answer in zip(reductions, answers, strict=True)]


def _at(answer: Any, device: torch.device | None) -> Any:
    """Move an answer to the device if it is a tensor or a Top; return others unchanged."""
    if isinstance(answer, Tensor):
        return answer.detach().to(device)
    if isinstance(answer, Top):
        return Top(_at(answer.values, device), _at(answer.indices, device))
    return answer
