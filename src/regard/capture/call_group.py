"""The calls that are one attention, from the first to the last."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from regard.capture.generation import Run
from regard.capture.layer_entries import Entries
from regard.capture.merged_answers import AskedOfCalls, Pairs, ask, joins
from regard.capture.merging import Copies
from regard.capture.recorded_values import Values
from regard.capture.selection import Selection
from regard.capture.slicing import some_queries
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, InMemory, Layer, Queries
from regard.reductions.reduction import Reduction

__all__ = ["Kept", "queries_kept"]


class _Call(NamedTuple):
    """A call of which answers are kept.

    Attributes:
        rows: the places of its queries among all that ran.
        shape: of the matrix that was asked.
        answers: those that do not join.
        queries: which its rows are.
    """

    rows: range
    shape: torch.Size
    answers: Pairs
    queries: Queries | None


class Kept:
    """The kept part of a run: copies of its queries and masks, or answers of each call.

    Args:
        module: the name of the run's module.
        run: the calls.
        wanted: what to keep of them.
        entries: get the layer, from the first call on that was wanted.
        leading: the batch axes and heads.
        copies: None where only answers are kept.
        values: that the calls drew from; None where they are not wanted.

    Attributes:
        module: as given.
        values: as given.
        name: of the layer; None while none of its queries was wanted.
    """

    def __init__(
        self,
        module: str,
        run: Run,
        wanted: Selection,
        entries: Entries,
        leading: torch.Size,
        copies: Copies | None,
        values: Values | None,
    ) -> None:
        self.module = module
        self.values = values
        self.name: str | None = None
        self._run = run
        self._wanted = wanted
        self._entries = entries
        self._leading = leading
        self._copies = copies
        self._answers = AskedOfCalls(run)
        self._rows: list[range] = []  # the places of the queries that answers are of, call by call
        # Of the first call: its rows, shape and answers that do not join, until it is known not to
        # be the only one; then the layers that hold the answers of one call each, and what these
        # answer.
        self._first: _Call | None = None
        self._calls: list[str] = []
        self._alone: list[Reduction] = []

    def take(self, matrix: AttentionMatrix, first: int, base: int) -> None:
        """Keep the wanted queries of a call: copies of them, or answers.

        Args:
            matrix: of the call.
            first: the place of the call's first query among all that ran.
            base: the column of its first key.
        """
        # What begins where others cannot go on from is all there is of it.
        all_there = self._copies is None or self._run.traits is None
        there = self._wanted.rows(first, matrix.shape[-2], all_there=all_there)
        if not there:
            return
        wanted, first = some_queries(matrix, there), first + there.start
        if self._copies is not None:
            self._copies.add(wanted, first, base)
        else:
            pairs = ask(wanted, self._wanted.reductions, self._wanted.device)
            self._put_answers(pairs, wanted.shape, first, base)

    def show_first(self) -> None:
        """Add the layer while the model runs, from the first call that was wanted."""
        first = None if self.name is not None else self._copied(self.module)
        if first is not None:
            matrix = None if first.matrix is None else first.whole()
            self.name = self._entries.add(
                self.module, matrix, shape=first.shape, queries=first.queries
            )

    def put_together(self) -> None:
        """Make one layer of all calls; there will be no other."""
        if self._run.parts == 1 or self.name is None:
            return
        self._set_first_apart()
        layer = self._copied(self.name) if self._copies is not None else self._asked(self.name)
        if layer is not None:
            self._entries.complete(self.module, layer)
        elif self._calls:
            self._entries.remove_one(self.module, self.name)

    def _copied(self, name: str) -> Layer | None:
        rows = self._wanted.rows(0, self._run.q_len, all_there=True)
        matrix = None if self._copies is None else self._copies.matrix(rows)
        if matrix is None:
            return None
        queries = queries_kept(rows, self._run.q_len, self._run.start)
        return Layer(name, matrix.shape, InMemory(matrix), Answers(), queries=queries)

    def _asked(self, name: str) -> Layer | None:
        pairs = self._answers.joined()
        if not pairs:
            return None
        shape = torch.Size((*self._leading, sum(map(len, self._rows)), self._run.kv_len))
        queries = queries_kept(_neighbours(self._rows), self._run.q_len, self._run.start)
        apart = Answers([(each, tuple(self._calls)) for each in self._alone])
        return Layer(name, shape, None, Answers(pairs), queries=queries, apart=apart)

    def _put_answers(self, pairs: Pairs, shape: torch.Size, first: int, base: int) -> None:
        """Keep answers. Those that do not join are layers of their own, ``name[7:8]``.

        Args:
            pairs: the reductions and their answers.
            shape: of the matrix that was asked.
            first: the place of its first row among all that ran.
            base: the column of its first key.
        """
        run = self._run
        joining = [pair for pair in pairs if joins(pair[0])]
        alone = [pair for pair in pairs if not joins(pair[0])]
        self._answers.add(joining, first, base)
        rows = range(first, first + shape[-2])
        self._rows.append(rows)
        call = _Call(rows, shape, alone, queries_kept(rows, run.q_len, run.start))
        if self.name is None:
            self.name = self._entries.add(
                self.module, None, shape=shape, answers=pairs, queries=call.queries
            )
            self._first = call
            return
        self._set_first_apart()
        self._set_apart(call)

    def _set_first_apart(self) -> None:
        """Add a layer for the answers of the first call that do not join."""
        if self._first is not None:
            self._set_apart(self._first)
        self._first = None

    def _set_apart(self, call: _Call) -> None:
        if not call.answers:
            return
        added = self._entries.add(
            self.module,
            None,
            shape=call.shape,
            answers=call.answers,
            queries=call.queries,
            name=f"{self.name}[{call.rows.start}:{call.rows.stop}]",
        )
        self._calls.append(added)
        self._alone = [reduction for reduction, _ in call.answers]


def queries_kept(rows: range | None, ran: int, start: int = 0) -> Queries | None:
    """Return which of the queries are kept; None: all from the first token on, or it is not known.

    Args:
        rows: among those that ran.
        ran: how many ran.
        start: where the first of them stands.
    """
    if rows is None or (rows == range(ran) and not start):
        return None
    return Queries(start + rows.start, start + ran)


def _neighbours(parts: Sequence[range]) -> range | None:
    """Return several ranges as one; None where something lies between them."""
    if any(after.start != before.stop for before, after in pairwise(parts)):
        return None
    return range(parts[0].start, parts[-1].stop)
