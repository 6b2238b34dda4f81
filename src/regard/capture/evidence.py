"""Query and key in the place of weights, where they give all the weights that met a value.

The weights W that a model multiplied with a value, (..., num_heads, q_len, kv_len), take memory
that grows with the square of the text. Where W = softmax(S) and S = scale · query · keyᵀ + bias
with a mask, the matrix keeps query, key and the small rest. Both equations are compared at every
element, block by block. The only tolerance is the rounding of the scores' own dtype. Nothing is
read from operations but a first guess of scale, softcap and bias; without a guess that fits, the
scale is fitted to the numbers. Otherwise the answer is None, and the weights themselves are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod, sqrt
from typing import NamedTuple, cast

import torch
from torch import Tensor

from regard.capture.score_steps import Steps
from regard.capture.slicing import drop_repeated_heads
from regard.masks import Mask
from regard.masks.recognise import narrowed, recognised
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.scores.query_key import QueryKeyScores

_HIDDEN = -500.0
"""A score that is this much lower than query and key give it, and has weight 0, is masked."""

_BLOCK = 2**18
"""The number of scores that are compared at once; they lie in the cache."""

_COARSE = 0.01
"""The largest rounding of a sum of scores and a number of a row from which scores are read."""

_FAST_FLOAT32 = 2.0**-9
"""The relative error of a float32 product with TF32 or bfloat16 arithmetic."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """The numbers of a model on the way to the weights that met a value, on the weights' axes.

    Attributes:
        weights: (..., q_len, kv_len).
        rounding: the largest relative error of a cast of the weights.
        scores: the input of the softmax, (..., q_len, kv_len).
        sink: a column beside the scores that takes part in the softmax, (..., q_len, 1).
        given_sink: the column as it was put beside scores, broadcastable to the sink; None if
            it is unknown.
        query: (..., q_len, head_dim).
        key: (..., kv_len, head_dim).
        steps: a guess of the steps between query · keyᵀ and the scores.
        terms: the numbers of ``steps.terms``, broadcastable to the scores; None if unknown.
    """

    weights: Tensor
    rounding: float
    scores: Tensor
    sink: Tensor | None
    given_sink: Tensor | None
    query: Tensor
    key: Tensor
    steps: Steps
    terms: tuple[Tensor, ...] | None

    @cached_property
    def numbers(self) -> "_Scores":
        return _Scores(self)

    @cached_property
    def gives_weights(self) -> bool:
        """True if the softmax of the scores gives all weights, but rows that are 0 or NaN."""
        return self.numbers.give_the_weights()

    @property
    def is_exact(self) -> bool:
        """True if the weights are exactly the softmax of the scores."""
        return self.gives_weights and self.numbers.is_plain


def explained(evidence: Evidence, *, gradients: bool) -> AttentionMatrix | None:
    """Return the matrix of query and key that gives the weights; None if it would not give all.

    With ``gradients``, it is also None if a gradient would not reach all that it reached in the
    model, as that of a learned temperature.
    """
    scores = evidence.numbers
    if not evidence.gives_weights:
        return None
    query, key, steps = evidence.query, evidence.key, evidence.steps
    added = _added(evidence, gradients=gradients)
    scale, cap = steps.scale, steps.cap
    bias: Tensor | None = None
    rest: _Rest | None = None
    if added is not None and not (gradients and steps.is_learned):
        bias = added.whole
        # A matrix caps the bias as well, so numbers that are added after the cap are none.
        if cap is None or (cap > 0 and bias is None):
            rest = scores.rest(scale, cap, added.finite)
    if rest is None and not gradients:
        cap, nothing = None, _Added(None, None)
        tries = (nothing,) if added is None or added.finite is None else (added, nothing)
        for tried in tries:
            fit = _fit(scores, tried.finite)
            if fit is not None:
                scale, rest, bias = *fit, tried.whole
                break
    if rest is None or (gradients and rest.low is not None):
        return None  # the gradient of a low row is lost in its rounding
    sink = _same_in_all_rows(evidence, rest, gradients=gradients)
    if sink is None and evidence.sink is not None:
        return None
    if isinstance(scale, Tensor):
        query = (query * scale.reshape(*query.shape[:-1], 1)).to(query.dtype)
        scale = 1.0
    key = drop_repeated_heads(key)
    shape = evidence.weights.shape
    if query.ndim > 4 and key.shape[-3] == 1 < query.shape[-3]:
        # Groups of heads that share a key are heads of one axis.
        query, key = query.flatten(-4, -3), key.squeeze(-3)
        bias, sink = (
            None if each is None else each.expand(*shape[:-2], *each.shape[-2:]).flatten(-4, -3)
            for each in (bias, sink)
        )
        rest = rest.joined(shape)
        shape = torch.Size((*shape[:-4], shape[-4] * shape[-3], *shape[-2:]))
    mask, low = rest.mask(shape), rest.low
    if low is not None:
        bias = low if bias is None else bias + low
    scale = scale if cap is None else scale * cap
    matrix = attend(query, key, mask=mask, scale=scale, bias=bias, softcap=cap)
    return matrix if sink is None else _with_sink(matrix, sink)


def _with_sink(matrix: AttentionMatrix, sink: Tensor) -> AttentionMatrix:
    """Return a matrix with a logit beside the scores, broadcastable to (..., 1, 1)."""
    source = cast(QueryKeyScores, matrix.source)
    sink = sink.reshape((1,) * (len(matrix.shape) - sink.ndim) + sink.shape)
    return AttentionMatrix(replace(source, sink_bias=sink), matrix.mask)


def _fit(scores: "_Scores", bias: Tensor | None) -> "tuple[float | Tensor, _Rest] | None":
    """Return a scale that gives the scores less a bias, and the rest; None without one."""
    for scale in filter(scores.depend_on, scores.fitted(bias)):
        rest = scores.rest(scale, None, bias)
        if rest is not None:
            return scale, rest
    return None


@dataclass(frozen=True, eq=False)
class _Rest:
    """The part of scores that scale, softcap and bias leave.

    ``hidden`` is True for masked keys, (..., q_len, kv_len); None without any. ``low`` has the
    number of a row whose scores are all so low that only their rounding is left, (..., q_len, 1).
    ``shift`` has the numbers that were added to whole rows, (..., q_len, 1).
    """

    hidden: Tensor | None
    low: Tensor | None
    shift: Tensor | None = None

    def mask(self, shape: torch.Size) -> Mask | None:
        return None if self.hidden is None else recognised(~self.hidden, shape)

    def joined(self, shape: torch.Size) -> "_Rest":
        """Return it with both axes of heads of the shape as one."""
        wide = (
            None if each is None else each.expand(*shape[:-1], each.shape[-1]).flatten(-4, -3)
            for each in (self.hidden, self.low)
        )
        return _Rest(*wide)


class _Added(NamedTuple):
    """The sum of the numbers that were added to scores; None if they do no more than mask.

    ``finite`` is 0 where ``whole`` is so low that it masks.
    """

    whole: Tensor | None
    finite: Tensor | None


class _Scores:
    """The scores of some evidence with one leading axis, in blocks."""

    def __init__(self, evidence: Evidence) -> None:
        # It holds no evidence, which holds it: a cycle would keep all tensors alive.
        self._query, self._key = evidence.query, evidence.key
        self._rounding = evidence.rounding
        self._shape = evidence.weights.shape
        q_len, kv_len = self._shape[-2:]
        self._count = prod(self._shape[:-2])
        is_double = evidence.scores.dtype == torch.float64
        self._dtype = torch.float64 if is_double else torch.float32
        self._weights, self._scores = (
            each.reshape(self._count, q_len, kv_len) for each in (evidence.weights, evidence.scores)
        )
        self._sink = None
        if evidence.sink is not None:
            sink = evidence.sink.expand(*self._shape[:-1], 1)
            self._sink = sink.reshape(self._count, q_len, 1)
        self._eps = evidence.steps.eps
        self._shift: Tensor | None = None
        self.is_plain = True  # all weights are exactly the softmax of the scores
        self._largest = 0.0  # the largest score that lengths allow, with the scale of ``rest``

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield slices of the leading axis and of the rows."""
        q_len, kv_len = self._shape[-2:]
        count = max(1, _BLOCK // (q_len * kv_len))
        height = q_len if count > 1 else max(1, _BLOCK // kv_len)
        for row in range(0, q_len, height):
            for first in range(0, self._count, count):
                yield slice(first, first + count), slice(row, row + height)

    def give_the_weights(self) -> bool:
        """Return True if the softmax of all scores gives the weights, or a row is 0 or NaN."""
        return all(self._give(*block) for block in self.blocks())

    def _give(self, some: slice, rows: slice) -> bool:
        weights, scores = self._weights[some, rows], self._scores[some, rows]
        scores = scores.to(self._dtype)
        if self._sink is not None:
            scores = torch.cat([scores, self._sink[some, rows].to(self._dtype)], -1)
        given = scores.softmax(-1)[..., : weights.shape[-1]]
        if torch.equal(given.to(weights.dtype), weights):
            return True
        self.is_plain = False
        wide = weights.to(self._dtype)
        eps = max(self._rounding, 4 * torch.finfo(self._dtype).eps)
        # Numbers below the normal ones of a dtype are rounded to multiples of the smallest one.
        tiny = torch.finfo(weights.dtype).smallest_normal
        same = (wide - given).abs() <= 2 * eps * given + tiny
        same |= _dead(wide)[..., None]
        return bool(same.all())

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key in the dtype of comparison, and the rounding of their product."""
        query, key = self._query, self._key
        fast = query.is_cuda or torch.get_float32_matmul_precision() != "highest"
        query = query.reshape(self._count, *query.shape[-2:]).to(self._dtype)
        key = key.reshape(self._count, *key.shape[-2:]).to(self._dtype)
        reach = self._reach
        error = 4 * torch.finfo(self._dtype).eps * sqrt(query.shape[-1])
        if fast:
            error += max(_FAST_FLOAT32 if self._dtype == torch.float32 else 0.0, self._eps)
        return query, key.mT, reach * error

    @cached_property
    def _reach(self) -> Tensor:
        """Return the largest product of each query with a key that lengths allow, (count, q, 1)."""
        lengths = (
            each.to(self._dtype).square().sum(-1).sqrt() for each in (self._query, self._key)
        )
        of_queries, of_keys = (each.reshape(self._count, -1) for each in lengths)
        return (of_queries * of_keys.amax(-1, keepdim=True))[..., None]

    def rest(self, scale: float | Tensor, cap: float | None, bias: Tensor | None) -> _Rest | None:
        """Return the mask that the scores have beyond scale, cap and bias; None for other numbers.

        The scale is a number, or a tensor with one number for each row, (count, q_len, 1).
        """
        q_len, kv_len = self._shape[-2:]
        largest = scale.abs().max() if isinstance(scale, Tensor) else abs(scale * (cap or 1.0))
        self._largest = float(self._reach.max()) * float(largest)
        self._shift = None
        hidden: Tensor | None = None
        low: Tensor | None = None
        of_bias = None if bias is None else _Spread(bias, self._shape)
        for some, rows in self.blocks():
            block = self._block_rest(some, rows, scale, cap, of_bias)
            if block is None:
                return None
            if block.hidden is not None:
                hidden = self._none(torch.bool, kv_len) if hidden is None else hidden
                hidden[some, rows] = block.hidden
            if block.low is not None:
                low = self._none(self._dtype, 1) if low is None else low
                low[some, rows] = block.low
        leading = self._shape[:-2]
        hidden = None if hidden is None else hidden.reshape(self._shape)
        if low is not None:
            low = narrowed(low.reshape(*leading, q_len, 1)).to(self._query.dtype)
        shift = None if self._shift is None else self._shift.reshape(*leading, q_len, 1)
        return _Rest(hidden, low, shift)

    def _none(self, dtype: torch.dtype, columns: int) -> Tensor:
        """Return zeros with a number of columns for each row."""
        size = (self._count, self._shape[-2], columns)
        return torch.zeros(size, dtype=dtype, device=self._scores.device)

    def _block_rest(
        self,
        some: slice,
        rows: slice,
        scale: float | Tensor,
        cap: float | None,
        bias: "_Spread | None",
    ) -> "_Rest | None":
        """Return the rest of one block, without its shift; None for other numbers."""
        query, key, error = self._factors
        scores = self._scores[some, rows].to(self._dtype)
        query, key, error = query[some, rows], key[some], error[some, rows]
        if isinstance(scale, Tensor):
            query, error = query * scale[some, rows], error * scale[some, rows].abs()
        else:
            error = error * abs(scale * (cap or 1.0))
        factor = 1.0 if isinstance(scale, Tensor) else scale
        if cap is None:
            left = torch.baddbmm(scores, query, key, alpha=-factor)
        else:
            left = scores - cap * (factor * (query @ key)).tanh_()
        if bias is not None:
            left = left - bias.block(some, rows)
        least, most = left.aminmax()
        if self.is_plain and float(error.min()) >= max(float(most), -float(least)):
            return _Rest(None, None)
        if not bool(most < torch.inf):
            return None
        return self._read(some, rows, scores, left, error)

    def _read(
        self, some: slice, rows: slice, scores: Tensor, left: Tensor, error: Tensor
    ) -> "_Rest | None":
        """Return the masked keys and the low rows of one block; None for other numbers."""
        weights = self._weights[some, rows]
        hidden = left < _HIDDEN
        if self.is_plain and not bool(hidden.all(-1).any()):
            # Every row has keys. A masked key has the weight 0 if no score is large.
            is_zero = self._largest < -_HIDDEN / 4 or not bool(weights[hidden].any())
            least, most = left.masked_fill(hidden, 0.0).aminmax()
            if is_zero and float(error.min()) >= max(float(most), -float(least)):
                return _Rest(hidden, None)
        dead = _dead(weights)[..., None]
        lost = hidden.all(-1, keepdim=True) & ~dead
        lowered = None
        if bool(lost.any()):
            # All scores of these rows are low. The lower ones are masked, the others are alike.
            most = left.amax(-1, keepdim=True)
            near = 8 * self._eps * most.abs() + error
            lower = (left == -torch.inf) | (left < most + _HIDDEN - near)
            if bool((lost & ~lower & (left < most - near)).any()):
                return None
            lowered = torch.where(lost, scores.amax(-1, keepdim=True), 0.0)
            hidden = torch.where(lost, lower, hidden)
        if bool((hidden & ~dead & (weights != 0)).any()):
            return None
        if bool((weights.isnan().any(-1) & (scores.amax(-1) > -torch.inf)).any()):
            return None  # NaN in a row with keys
        hidden = hidden | dead
        left = left.masked_fill(hidden | lost, 0.0)
        bound = (2 * self._eps * scores.abs()).masked_fill_(hidden | lost, 0.0).add_(error)
        if self._eps > 1e-4 and not self._is_balanced(scores, left, error):
            return None
        if not bool((left.abs() <= bound).all()):
            # Numbers that are added to a whole row change no weight.
            best = scores.masked_fill(hidden | lost, -torch.inf).argmax(-1, keepdim=True)
            shift = left.gather(-1, best)
            if self._shift is None:
                self._shift = self._none(self._dtype, 1)
            self._shift[some, rows] = shift
            left = (left - shift).masked_fill(hidden | lost, 0.0)
            coarse = self._eps * scores.gather(-1, best).abs()
            if bool((coarse.masked_fill(lost | dead, 0.0) > _COARSE).any()):
                return None  # the sums are too coarse to show the scores
            bound = bound + coarse
            bound = bound.masked_fill(lost | dead, torch.inf)
            if not bool((left.abs() <= 2 * bound).all()):
                return None
        return _Rest(hidden if bool(hidden.any()) else None, lowered)

    def depend_on(self, scale: float | Tensor) -> bool:
        """Return True if query and key tell two scores apart, with this scale."""
        largest = scale.abs().min() if isinstance(scale, Tensor) else abs(scale)
        return float(largest) * float(self._reach.max()) > 1e-3

    def _is_balanced(self, scores: Tensor, left: Tensor, error: Tensor) -> bool:
        """Return True if the rest of each key's scores cancels as rounding does.

        In 16 bits, a small number that was added to all scores of a key hides behind the rounding
        of each, and not behind that of their sum. The limit is five standard deviations.
        """
        deviation = self._eps * scores.where(left != 0, 0.0).square().sum(-2).sqrt() / 2
        return bool((left.sum(-2).abs() <= 5 * deviation + error.sum(-2)).all())

    def fitted(self, bias: Tensor | None) -> Iterator[float | Tensor]:
        """Yield scales that fit the scores less a bias: of all rows, of each head, of each row."""
        query, key, _ = self._factors
        of_bias = None if bias is None else _Spread(bias, self._shape)
        rows_of: dict[int, list[Tensor]] = {}  # the sums of each block, (count, rows, 2)
        for some, rows in self.blocks():
            product = (query[some, rows] @ key[some]).double()
            scores = self._scores[some, rows].double()
            if of_bias is not None:
                scores = scores - of_bias.block(some, rows)
            visible = (self._weights[some, rows] > 0) & (scores > _HIDDEN * 20)
            product, scores = (_centred(each, visible) for each in (product, scores))
            sums = torch.stack([(product * scores).sum(-1), product.square().sum(-1)], -1)
            rows_of.setdefault(rows.start, []).append(sums)
        sums = torch.cat([torch.cat(parts, 0) for parts in rows_of.values()], 1)
        total = sums.sum((0, 1))
        if float(total[1]) == 0:
            return
        yield float(total[0] / total[1])
        by_head = sums.sum(1, keepdim=True)
        yield _ratio(by_head).expand(self._count, self._shape[-2], 1).to(self._dtype)
        yield _ratio(sums).to(self._dtype)


class _Spread:
    """A bias that broadcasts to a shape, read in blocks with one leading axis."""

    def __init__(self, bias: Tensor, shape: torch.Size) -> None:
        leading = bias.shape[:-2]
        index = torch.arange(prod(leading), device=bias.device).view(leading)
        self._index = index.expand(shape[:-2]).reshape(-1)
        self._bias = bias.reshape(-1, *bias.shape[-2:])

    def block(self, some: slice, rows: slice) -> Tensor:
        bias = self._bias if self._bias.shape[-2] == 1 else self._bias[:, rows]
        return bias[self._index[some]] if len(bias) > 1 else bias


def _added(evidence: Evidence, *, gradients: bool) -> _Added | None:
    """Return the sum of the numbers that were added to scores.

    The result is None if they are unknown, or if their sum would lose a gradient.
    """
    if evidence.terms is None:
        return None
    parts: list[tuple[Tensor, Tensor]] = []
    terms = zip(evidence.steps.terms, evidence.terms, strict=True)
    for term, numbers in terms:
        if numbers.shape[-1] == 1 < evidence.scores.shape[-1]:
            continue  # numbers that are added to a whole row change no weight
        whole = numbers if term.factor == 1 else numbers * term.factor
        low = whole < _HIDDEN
        finite = whole.masked_fill(low, 0.0) if bool(low.any()) else whole
        if bool(finite.any()) or (gradients and term.numbers.requires_grad):
            parts.append((whole, finite))
            if gradients and term.numbers.requires_grad and term.factor != 1:
                return None
    if len(parts) < 2:
        return _Added(*parts[0]) if parts else _Added(None, None)
    if gradients and any(term.numbers.requires_grad for term in evidence.steps.terms):
        return None
    total = sum((finite for _, finite in parts[1:]), parts[0][1])
    return _Added(total, total)


def _same_in_all_rows(evidence: Evidence, rest: "_Rest", *, gradients: bool) -> Tensor | None:
    """Return the logits of a sink, broadcastable to (..., 1, 1).

    The result is None without a sink, and for one whose logits differ by row.
    Numbers that were added to a whole row were added to its sink, too.
    """
    column = evidence.sink
    if column is None:
        return None
    size = column.abs() + 1
    if rest.shift is not None:
        size = size + rest.shift.abs()  # the difference has the rounding of the larger number
        column = column - rest.shift
    bound = 8 * evidence.steps.eps * size
    dead = _dead(evidence.weights)[..., None]
    for sink in (evidence.given_sink, None if gradients else column):
        if sink is None:
            continue
        of_leading = sink[..., :1, :1]
        for each in (of_leading[(slice(0, 1),) * (sink.ndim - 3)], of_leading):
            if bool((((column - each).abs() <= bound) | dead).all()):
                return each
    return None


def _dead(weights: Tensor) -> Tensor:
    """Return True for each row that is 0, or that a softmax without keys made NaN."""
    return (weights.amax(-1) == 0) | weights.isnan().all(-1)


def _centred(numbers: Tensor, visible: Tensor) -> Tensor:
    """Return numbers less the mean of the visible ones of their row; 0 for the others."""
    numbers = numbers.where(visible, 0)
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    return (numbers - numbers.sum(-1, keepdim=True) / count).where(visible, 0)


def _ratio(sums: Tensor) -> Tensor:
    """Return the quotient of both sums, (..., 1); of a row without any, that of all rows."""
    total = sums.sum((0, 1))
    first, second = sums[..., :1], sums[..., 1:]
    return torch.where(second > 0, first / second, total[0] / total[1])
