"""The calls that are one attention, put together: their queries, their biases and their masks."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.capture.generation import Order, Run, order_since
from regard.capture.merged_masks import Piece, joined_mask, reordered, signature
from regard.capture.tensor_copies import TensorCopies
from regard.masks import Mask
from regard.masks.row_slice import row_slice_of
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.query_key import QueryKeyScores

__all__ = ["Copies", "Shared", "Step"]


@dataclass(frozen=True, eq=False)
class Step:
    """The kept part of one call, without its keys.

    Attributes:
        first: the place of its first query among all that ran.
        query: (..., num_heads, rows, head_dim).
        mask: bound to (..., num_heads, rows, kv_len); None: all keys.
        bias: numbers added; every axis of the call's matrix, full or 1.
        base: the column of its first key.
        kv_len: how many keys it had.
    """

    first: int
    query: Tensor
    mask: Mask | None
    bias: Tensor | None
    base: int
    kv_len: int

    @property
    def rows(self) -> range:
        """Return the places of its queries."""
        return range(self.first, self.first + self.query.shape[-2])

    def only(self, wanted: range) -> "Step":
        """Return the same with those of its queries alone that have a wanted place."""
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


class _Ordered(NamedTuple):
    """A step, and how the entries of the batch, at the end, were ordered then."""

    step: Step
    order: Order | None


class Shared:
    """The joined masks and biases that layers whose calls had the same ones share."""

    def __init__(self) -> None:
        self._masks: dict[Hashable, Mask | None] = {}
        self._biases: dict[Hashable, Tensor | None] = {}
        self._met: list[object] = []  # alive, so that nothing else has the same id

    def of(
        self, steps: Sequence[Step], pieces: Sequence[_Ordered], shape: torch.Size, rows: range
    ) -> tuple[Mask | None, Tensor | None]:
        """Return the mask and the bias of all steps.

        Args:
            steps: as they were kept.
            pieces: those of their queries that are wanted.
            shape: (..., num_heads, q_len, kv_len) with every query that ran.
            rows: the places of the wanted queries.
        """
        calls = [(s.first, len(s.rows), s.base, s.kv_len, order) for s, order in pieces]
        alike = (shape, rows.start, rows.stop, *calls)
        masks = (alike, *(signature(step.mask) for step in steps))
        if masks not in self._masks:
            parts = [
                Piece(s.mask, s.first, len(s.rows), s.base, s.kv_len, order) for s, order in pieces
            ]
            self._masks[masks] = joined_mask(parts, shape, rows)
        biases = (alike, *(id(step.bias) for step in steps))
        if biases not in self._biases:
            self._biases[biases] = _joined_bias(pieces, shape)
        self._met += [(step.mask, step.bias) for step in steps]
        return self._masks[masks], self._biases[biases]


class Copies:
    """Copies of what the calls of one attention attended with.

    Args:
        run: the calls; it holds their keys.
        tensor_copies: where the copies go.
        shared: what layers share.
    """

    def __init__(self, run: Run, tensor_copies: TensorCopies, shared: Shared) -> None:
        self._run = run
        self._tensor_copies = tensor_copies
        self._shared = shared
        self._steps: list[Step] = []
        self._source: QueryKeyScores | None = None

    def add(self, part: AttentionMatrix, first: int, base: int) -> None:
        """Copy a call, after those that came before; its keys are in the run.

        Args:
            part: its wanted queries.
            first: the place of their first among all that ran.
            base: the column of its first key.
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
        self._steps.append(Step(first, query, mask, bias, base, part.shape[-1]))

    def matrix(self, wanted: range) -> AttentionMatrix | None:
        """Return one attention of all calls; None where it has none of the wanted queries."""
        if self._source is None:
            return None
        run, ordered = self._run, list[_Ordered]()
        for step in self._steps:
            part = step.only(wanted)
            if part.rows:
                ordered.append(_Ordered(part, order_since(step.first, run.orders)))
        if not ordered:
            return None
        queries = [reordered(step.query, order) for step, order in ordered]
        # One alone is a copy already; a part of one would keep the whole alive.
        alone = len(queries) == 1 and queries[0].nbytes == queries[0].untyped_storage().nbytes()
        query = queries[0] if alone else torch.cat(queries, -2)
        mask, bias, key = ordered[0].step.mask, ordered[0].step.bias, run.keys
        if run.parts > 1:
            # Room for keys that never came is not kept.
            key = run.keys[..., : run.kv_len, :].contiguous()
            shape = torch.Size((*query.shape[:-2], run.q_len, run.kv_len))
            rows = range(ordered[0].step.rows.start, ordered[-1].step.rows.stop)
            mask, bias = self._shared.of(self._steps, ordered, shape, rows)
        return AttentionMatrix(replace(self._source, query=query, key=key, bias=bias), mask)


def _joined_bias(pieces: Sequence[_Ordered], shape: torch.Size) -> Tensor | None:
    """Return the numbers added in each step; 0 where a step adds none, or has no such key."""
    given = [step.bias for step, _ in pieces if step.bias is not None]
    if not given:
        return None
    leading = [max(axis) for axis in zip(*(bias.shape[:-2] for bias in given), strict=True)]
    count = sum(len(step.rows) for step, _ in pieces)
    joined, row = given[0].new_zeros(*leading, count, shape[-1]), 0
    for step, order in pieces:
        there = joined[..., row : row + len(step.rows), step.base : step.base + step.kv_len]
        row += len(step.rows)
        if step.bias is not None:
            whole = step.bias.expand(*step.bias.shape[:-2], len(step.rows), step.kv_len)
            there.copy_(reordered(whole, order)[..., : there.shape[-1]])
    return joined
