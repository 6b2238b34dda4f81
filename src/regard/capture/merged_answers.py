"""Answers asked at each call, put together to those of one attention where they can be."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.capture.generation import Run, order_since
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import asked_of
from regard.reductions.reduction import Reduction, RowStatistic
from regard.reductions.sums import Sum
from regard.reductions.top_k import Top, TopK

__all__ = ["AskedOfCalls", "ask", "joins"]

Pairs = list[tuple[Reduction, Any]]


def ask(
    matrix: AttentionMatrix, reductions: Sequence[Reduction], device: torch.device | None
) -> Pairs:
    """Return each reduction with its answer, on the device; None: where the matrix is."""
    answers = asked_of(matrix, reductions)
    return [(each, _at(answer, device)) for each, answer in zip(reductions, answers, strict=True)]


def _at(answer: Any, device: torch.device | None) -> Any:
    """Return an answer on the device: a tensor, or a named tuple of them; else as it is."""
    if isinstance(answer, Tensor):
        return answer.detach().to(device)
    if isinstance(answer, Top):
        return Top(_at(answer.values, device), _at(answer.indices, device))
    return answer


def joins(reduction: Reduction) -> bool:
    """Return True if the answers of several calls make one: of rows, and sums over rows.

    Example:
        >>> import regard
        >>> from regard.capture.merged_answers import joins
        >>> joins(regard.TopK(8)), joins(regard.Sum(-2)), joins(regard.Pool(64, 64))
        (True, True, False)
    """
    return isinstance(reduction, RowStatistic | TopK | Sum)


class AskedOfCalls:
    """The answers of reductions that join, from call to call of one attention.

    Args:
        run: the calls.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._of_rows: dict[Reduction, list[tuple[int, tuple[Tensor, ...]]]] = {}
        self._sums: dict[Reduction, tuple[int, Tensor]] = {}

    def add(self, pairs: Pairs, first: int, base: int) -> None:
        """Take in the answers of a call.

        Args:
            pairs: reductions that join, each with its answer.
            first: the place of the first row they are of.
            base: the column of the first key.
        """
        for reduction, answer in pairs:
            if reduction == Sum(-2):
                self._sums[reduction] = (first, self._added(reduction, answer, base))
            elif isinstance(answer, Top):
                indices = answer.indices + base * (answer.indices >= 0)
                self._of_rows.setdefault(reduction, []).append((first, (answer.values, indices)))
            else:
                self._of_rows.setdefault(reduction, []).append((first, (answer,)))

    def joined(self) -> Pairs:
        """Return each reduction with its answer for all rows."""
        rows = [(each, self._concatenated(each)) for each in self._of_rows]
        sums = [(each, self._of_all_keys(*sums)) for each, sums in self._sums.items()]
        return [*rows, *sums]

    def _of_all_keys(self, first: int, total: Tensor) -> Tensor:
        """Return a sum over rows, with as many columns as there are keys."""
        missing = self._run.kv_len - total.shape[-1]
        return torch.nn.functional.pad(self._in_order(first, total), (0, missing))

    def _in_order(self, first: int, tensor: Tensor) -> Tensor:
        """Return an answer with the entries of the batch in their order by now."""
        order = order_since(first, self._run.orders)
        if order is None:
            return tensor
        return tensor.index_select(0, torch.tensor(order, device=tensor.device))

    def _added(self, reduction: Reduction, answer: Tensor, base: int) -> Tensor:
        """Return the sum so far, of as many columns as there are keys now."""
        run = self._run
        columns = answer.shape[-1] if run.parts == 1 else run.kv_len
        total = answer.new_zeros(*answer.shape[:-1], columns)
        if reduction in self._sums:
            before = self._in_order(*self._sums[reduction])[..., :columns]
            total[..., : before.shape[-1]] += before
        there = total[..., base : base + answer.shape[-1]]
        there += answer[..., : there.shape[-1]]
        return total

    def _concatenated(self, reduction: Reduction) -> Any:
        axis = -2 if isinstance(reduction, TopK) else -1
        parts = [
            [self._in_order(first, tensor) for tensor in tensors]
            for first, tensors in self._of_rows[reduction]
        ]
        whole = [torch.cat(tensors, axis) for tensors in zip(*parts, strict=True)]
        return Top(*whole) if len(whole) == 2 else whole[0]
