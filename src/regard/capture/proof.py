"""The numeric check of hand-written attention: a few rows compared with the recorded matrix.

``provenance.py`` tracks which operations ran. The rows show that nothing else changed an element:
the recorded query, key, mask and bias give the scores that were the input of the softmax, and the
weights that multiply the value equal the output of the softmax.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.products import Window
from regard.scores.query_key import QueryKeyScores

__all__ = ["Sample"]

_WHOLE = 2**18
"""The largest number of weights of which every row is compared; of more, four rows are."""

_FAST_FLOAT32 = 2.0**-9
"""The relative error of a float32 product with TF32 or bfloat16 arithmetic."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Copies of a few rows of the input and the output of a softmax.

    Attributes:
        rows: the ranges of the copied queries; one range if all are copied.
        scores: the input for each range, (..., num_heads, rows, kv_len); None if it is unknown.
        weights: the output for each range, of the same shape.
        rounding: the largest relative error of one operation on the scores.
        steps: the number of operations that rounded the scores.
    """

    rows: tuple[range, ...]
    scores: tuple[Tensor, ...] | None
    weights: tuple[Tensor, ...]
    rounding: float
    steps: int

    @classmethod
    def of(cls, scores: Tensor | None, weights: Tensor, dtype: torch.dtype, steps: int) -> "Sample":
        """Copy all rows of a small softmax, or four rows of a large one.

        Both tensors are on the axes of the matrix. ``dtype`` is the least precise one of query, key
        and scores.
        """
        q_len = weights.shape[-2]
        rows = (range(q_len),)
        if weights.numel() > _WHOLE:
            some = sorted({0, q_len // 3, 2 * q_len // 3, q_len - 1})
            rows = tuple(range(i, i + 1) for i in some)
        fast = weights.is_cuda or torch.get_float32_matmul_precision() != "highest"
        rounding = torch.finfo(dtype).eps
        if scores is None:
            rounding = max(rounding, torch.finfo(weights.dtype).eps)
        return cls(
            rows,
            None if scores is None else tuple(_copied(scores, part) for part in rows),
            tuple(_copied(weights, part) for part in rows),
            max(rounding, _FAST_FLOAT32) if fast and dtype == torch.float32 else rounding,
            steps,
        )

    def is_of(self, matrix: AttentionMatrix) -> bool:
        """Return True if a matrix gives these scores and weights from its current tensors."""
        shape = (*matrix.shape[:-2], -1, matrix.shape[-1])
        for place, rows in enumerate(self.rows):
            span = slice(rows.start, rows.stop)
            found = matrix.scores[..., span, :]
            given = cast(Tensor, matrix.reduce(Window(rows, range(matrix.shape[-1]))))
            weights = self.weights[place].reshape(shape)
            scores = None if self.scores is None else self.scores[place].reshape(shape)
            limit = self._limit(matrix, span, found)
            if not _agree(found.double(), scores, given.double(), weights.double(), limit):
                return False
        return True

    def _limit(self, matrix: AttentionMatrix, span: slice, found: Tensor) -> Tensor:
        """Return the largest rounding error of the scores of each row, (..., rows, 1)."""
        source = cast(QueryKeyScores, matrix.source)
        query, key = source.query[..., span, :].double(), source.key.double()
        longest = key.square().sum(-1).sqrt().amax(-1)
        if key.ndim > 2 and key.shape[-3] not in (1, query.shape[-3]):
            longest = longest.repeat_interleave(query.shape[-3] // key.shape[-3], -1)
        reach = query.square().sum(-1).sqrt() * longest[..., None] * abs(source.scale)
        best = found.double().amax(-1, keepdim=True)
        largest = found.double().masked_fill(_are_masked(found.double(), best), 0).abs().amax(-1)
        bias = 0.0
        if source.bias is not None:
            numbers = source.bias.double()
            numbers = numbers[numbers > -1e4]
            bias = float(numbers.abs().amax()) if numbers.numel() else 0.0
        accumulated = math.sqrt(query.shape[-1]) * 2.0**-23 * reach
        if query.is_cuda:  # may accumulate in the dtype of the factors
            accumulated += self.rounding * reach
        return (1e-5 + accumulated + (self.steps + 2) * self.rounding * (largest + bias))[..., None]

    def has_weights(self, used: Tensor, rounding: float, *, is_dropped: bool) -> bool:
        """Return True if the weights that multiply a value equal the output of the softmax.

        ``used`` has all rows, (..., num_heads, q_len, kv_len). A cast of them had the relative
        error ``rounding``. Dropout may have set some to 0 and scaled the others.
        """
        for rows, weights in zip(self.rows, self.weights, strict=True):
            part = used[..., rows.start : rows.stop, :]
            weights = weights.expand(part.shape)
            if not _are_same(part, weights, rounding, is_dropped=is_dropped):
                return False
        return True


def _are_same(used: Tensor, weights: Tensor, rounding: float, *, is_dropped: bool) -> bool:
    """Return True if ``used`` equals ``weights`` up to a cast, dropout and rows set to 0."""
    rounding = 2 * max(rounding, torch.finfo(used.dtype).eps, torch.finfo(weights.dtype).eps)
    used, weights = used.double(), weights.double()
    tiny = 2e-7 if rounding > 1e-3 else 1e-30  # float16 has no smaller numbers
    same = (used - weights).abs() <= rounding * weights.abs() + tiny
    # A softmax gives NaN for a row without keys, and models replace it by 0.
    same |= weights.isnan() & (used.isnan() | (used == 0))
    same |= (used == 0).all(-1, keepdim=True)
    if bool(same.all()):
        return True
    kept = used != 0
    factors = (used / weights)[kept & (weights > tiny)]
    if not is_dropped or not factors.numel():
        return False
    largest = factors.max()
    return bool((largest > 0.99) & (factors > 0.99 * largest).all())


def _copied(tensor: Tensor, rows: range) -> Tensor:
    return tensor[..., rows.start : rows.stop, :].clone(memory_format=torch.contiguous_format)


def _agree(
    found: Tensor, scores: Tensor | None, given: Tensor, weights: Tensor, limit: Tensor
) -> bool:
    """Return True if weights agree, and scores up to a constant per row."""
    # A row without an allowed key is NaN or uniform in the model, and 0 in the matrix.
    rows = (given.sum(-1, keepdim=True) > 0) & ~weights.isnan().any(-1, keepdim=True)
    rows &= (weights > 0).any(-1, keepdim=True)
    best = weights.masked_fill(weights.isnan(), -1).argmax(-1, keepdim=True)
    masked = _are_masked(found, found.gather(-1, best))
    if bool((rows & masked & (weights > 1e-6)).any()):
        return False
    error = (given.gather(-1, best).log() - weights.gather(-1, best).log()).abs()
    if bool((rows & ~(error <= 2 * limit + 1e-5)).any()):
        return False
    there = rows & ~masked
    if scores is None:
        there = there & (weights > 1e-7) & (given > 1e-7)
        ends = rows & ((weights > 1e-6) != (given > 1e-6))
        ends &= ~torch.isclose(weights, given, rtol=0, atol=1e-5)
        if bool(ends.any()):
            return False
        scores = weights.log()
    scores = scores.double()
    shift = scores.gather(-1, best) - found.gather(-1, best)
    differ = (scores - found - shift).abs() > 2 * limit
    differ |= scores.isnan() | scores.isinf()
    return not bool((there & differ).any())


def _are_masked(scores: Tensor, best: Tensor) -> Tensor:
    """Return a bool tensor, True for scores so far below ``best`` that their weight is 0."""
    return (scores - best < -1e3) | (scores == -torch.inf)
