"""Scores that were computed elsewhere, or the logarithms of given weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from regard.scores.box import Box, Cut, Index
from regard.scores.score_source import Scores, accumulation_dtype, scratch_scores
from regard.scores.scratch import Scratch


@final
@dataclass(frozen=True, eq=False)
class GivenScores(Scores):
    """Given scores, or the logarithms of given weights.

    Attributes:
        values: (..., num_heads, q_len, kv_len).
        are_weights: whether the values are weights, so that the scores are their logarithms.
    """

    values: Tensor
    are_weights: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    @property
    def runs_on_threads(self) -> bool:
        return True

    @property
    def facts(self) -> list[str]:
        return [f"from given {'weights' if self.are_weights else 'scores'}"]

    def select(self, index: Index) -> "GivenScores":
        return GivenScores(self.values[index], self.are_weights)

    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> Tensor:
        out = scratch_scores(scratch, box, self)
        values = cut(self.values, box.at_both)
        if self.are_weights:
            values = values.to(accumulation_dtype(values.dtype))
            zero = values == 0  # its gradient is 0, not 0 times infinity
            values = values.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)
        if out is not None:
            return out.copy_(values)
        return values.to(accumulation_dtype(self.values.dtype), copy=True)

    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        return None

    def map(self, function: Callable[[Tensor], Tensor]) -> "GivenScores":
        return GivenScores(function(self.values), self.are_weights)
