"""Scores of query and key: scaled, biased, modified, and capped."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from regard.errors import shape_text
from regard.scores.box import Box, Cut, Index, broadcast_index
from regard.scores.flex_callable import SCORE_MOD, FlexCallable
from regard.scores.grouped_heads import group_size, grouped_matmul, kv_leading, select_kv
from regard.scores.position_bias import Bias
from regard.scores.score_source import Scores, accumulation_dtype, scratch_scores
from regard.scores.scratch import Scratch

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""score_mod(score, b, h, q_idx, kv_idx) -> score, as in FlexAttention."""


def as_score_mod(function: object, shape: torch.Size, query: Tensor) -> FlexCallable | None:
    """Return a score_mod fitted to a matrix of this shape, or None."""
    if function is None:
        return None
    dtype = accumulation_dtype(query.dtype)
    return FlexCallable.fitted(function, SCORE_MOD, shape, query.device, dtype)


@final
@dataclass(frozen=True, eq=False)
class QueryKeyScores(Scores):
    """softcap(score_mod(scale · query·key + bias)), where each step is optional.

    Attributes:
        query: (..., num_heads, q_len, head_dim).
        key: (..., num_kv_heads, kv_len, head_dim); the batch axes equal the query's.
        scale: multiplies query·key.
        bias: numbers added to the scaled scores, with all axes of the matrix, each of full length
            or 1.
        position_bias: numbers that depend only on the head and the distance, kv_idx - q_idx,
            added to the scaled scores.
        score_mod: changes each score, given its indices b, h, q_idx and kv_idx.
        softcap: scores stay between -softcap and softcap.
        sink_bias: a logit in the denominator, with all axes of the matrix; the axes of rows and
            columns have length 1.
        rows_before: where the query has some rows of a matrix, the number of rows before them: a
            score_mod counts from the first row of that matrix. 0 without a score_mod.
        rows_after: the number of rows after them: a position bias aligns the last row of that
            matrix with the last key. 0 without a position bias.
    """

    query: Tensor
    key: Tensor
    scale: float
    bias: Tensor | None = None
    position_bias: Bias | None = None
    score_mod: FlexCallable | None = None
    softcap: float | None = None
    sink_bias: Tensor | None = None
    rows_before: int = 0
    rows_after: int = 0

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.query.shape[:-1], self.key.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        given = tuple(tensor for tensor in (self.bias, self.sink_bias) if tensor is not None)
        positions = () if self.position_bias is None else self.position_bias.tensors
        return (self.query, self.key, *given, *positions)

    # Every product reads dtype and device; the inherited properties would build a tuple each time.
    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def group(self) -> int:
        return group_size(self.query.shape[:-2], self.key)

    @property
    def facts(self) -> list[str]:
        facts = [f"scale={self.scale:.4g}"]
        if self.group > 1:
            facts.append(f"num_kv_heads={self.key.shape[-3]}")
        if self.bias is not None:
            facts.append(f"bias={shape_text(self.bias.shape)}")
        if self.position_bias is not None:
            facts.append(f"bias={self.position_bias!r}")
        if self.score_mod is not None:
            facts.append(f"score_mod={self.score_mod!r}")
        if self.softcap is not None:
            facts.append(f"softcap={self.softcap:.4g}")
        if self.sink_bias is not None:
            facts.append(f"sink_bias={shape_text(self.sink_bias.shape)}")
        return facts

    @property
    def runs_on_threads(self) -> bool:
        positions = self.position_bias is None or self.position_bias.runs_on_threads
        return positions and self.score_mod is None

    @property
    def plain(self) -> bool:
        """True if the scores are scale · query·key, plus at most a bias tensor."""
        more = (self.position_bias, self.score_mod, self.softcap, self.sink_bias)
        return all(each is None for each in more)

    @property
    def is_product(self) -> bool:
        """True if the scores are scale · query·key alone."""
        return self.plain and self.bias is None

    def select(self, index: Index) -> "QueryKeyScores":
        num_heads = self.query.shape[-3] if self.query.ndim > 2 else 1
        key = select_kv(self.key, index, num_heads)

        def chosen(tensor: Tensor) -> Tensor:
            return broadcast_index(tensor, index)

        return self._with(self.query[index], key, chosen, chosen)

    def rows(self, at: slice, rows: range, q_len: int) -> "QueryKeyScores":
        """Return the scores of some queries.

        Args:
            at: where they lie in the query.
            rows: their positions in a matrix, neighbours.
            q_len: the number of queries of that matrix.
        """
        bias = self.bias
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., at, :]
        return replace(
            self,
            query=self.query[..., at, :],
            bias=bias,
            rows_before=self.rows_before + rows.start if self.score_mod is not None else 0,
            rows_after=self.rows_after + q_len - rows.stop if self.position_bias is not None else 0,
        )

    def factors(self, box: Box, cut: Cut) -> tuple[Tensor, Tensor] | None:
        return self._factors(box, cut) if self.is_product else None

    def _factors(self, box: Box, cut: Cut) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(self.query.dtype)
        leading = kv_leading(box.leading, self.group)
        query = cut(self.query, box.at_rows).to(dtype) * self.scale
        return query, cut(self.key, (*leading, box.columns)).to(dtype).mT

    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> Tensor:
        dtype = accumulation_dtype(self.query.dtype)
        out = scratch_scores(scratch, box, self)
        scores = grouped_matmul(*self._factors(box, cut), out)
        if self.bias is not None:
            scores = scores.add_(cut(self.bias, box.at_both).to(dtype))
        if self.position_bias is not None:
            scores = scores.add_(
                self.position_bias.block(
                    box.moved(-self.rows_after),
                    self.shape,
                    scores.device,
                    lambda tensor: cut(tensor, box.leading).to(dtype),
                )
            )
        if self.score_mod is not None:
            # Often a view, of any dtype.
            changed = self.score_mod(box.moved(self.rows_before), scores)
            scores = changed.to(dtype, copy=True) if out is None else out.copy_(changed)
        if self.softcap is not None:
            # Autograd needs the result of tanh, so without `out` this step is not in place.
            scores = torch.mul(scores.div_(self.softcap).tanh_(), self.softcap, out=out)
        return scores

    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        if self.sink_bias is None:
            return None
        sink = cut(self.sink_bias, box.leading).to(accumulation_dtype(self.query.dtype))
        return sink.expand(*box.size[:-1], 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "QueryKeyScores":
        query = function(self.query)
        return self._with(query, function(self.key), function, lambda ids: ids.to(query.device))

    def _with(
        self,
        query: Tensor,
        key: Tensor,
        of_numbers: Callable[[Tensor], Tensor],
        of_indices: Callable[[Tensor], Tensor],
    ) -> "QueryKeyScores":
        """Return the same steps for another query and key, with their tensors mapped."""
        return replace(
            self,
            query=query,
            key=key,
            bias=None if self.bias is None else of_numbers(self.bias),
            position_bias=self.position_bias and self.position_bias.map(of_numbers),
            score_mod=self.score_mod and self.score_mod.map(of_indices),
            sink_bias=None if self.sink_bias is None else of_numbers(self.sink_bias),
        )
