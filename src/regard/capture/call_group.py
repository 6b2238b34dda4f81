"""Groups of calls that form one attention, which is one layer of the recording."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.capture.generation import Run
from regard.capture.merging import Copies
from regard.capture.recorded_values import Values
from regard.capture.selection import Selection
from regard.capture.slicing import some_queries
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, InMemory, Layer, Queries, asked_of
from regard.reductions.reduction import Reduction, RowStatistic
from regard.reductions.sums import Sum
from regard.reductions.top_k import Top, TopK

__all__ = ["CallGroup", "ask", "queries_kept"]

Pairs = list[tuple[Reduction, Any]]


def ask(
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
        wanted: Selection,
        leading: torch.Size,
        copies: Copies | None,
        values: Values | None,
    ) -> None:
        self.module = module
        self.values = values
        self.name: str | None = None
        self._run = run
        self._wanted = wanted
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
        there = self._wanted.rows(first, matrix.shape[-2], all_there=all_there)
        if there:
            wanted, first = some_queries(matrix, there), first + there.start
            if self._copies is not None:
                self._copies.add(wanted, first, base)
            else:
                self._rows.append(range(first, first + wanted.shape[-2]))
                pairs = ask(wanted, self._wanted.reductions, self._wanted.device)
                self._answers.append([self._placed(*pair, base) for pair in pairs])

    def layer(self) -> Layer | None:
        """Return the layer of all calls so far; None if none of their queries is selected.

        The layer lacks the answers of reductions in ``unmerged``.
        """
        run = self._run
        if self._copies is not None:
            rows = self._wanted.rows(0, run.q_len, all_there=True)
            matrix = self._copies.matrix(rows)
            if matrix is None:
                return None
            queries = queries_kept(rows, run.q_len, run.start)
            return Layer(self.module, matrix.shape, InMemory(matrix), Answers(), queries=queries)
        if not self._answers:
            return None
        left_out = [] if len(self._answers) == 1 else self.unmerged
        asked = [each for each, _ in self._answers[0]]
        answers = [(each, self._merged(each)) for each in asked if each not in left_out]
        shape = torch.Size((*self._leading, sum(map(len, self._rows)), run.kv_len))
        if run.parts == 1:
            shape = torch.Size((*shape[:-1], run.keys.shape[-2]))
        queries = queries_kept(_neighbours(self._rows), run.q_len, run.start)
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


def queries_kept(rows: range | None, ran: int, start: int = 0) -> Queries | None:
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
