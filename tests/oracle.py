"""The definition of attention written a second time, dense and in float64, and the error budget.

Imports nothing of regard, so that no mistake is shared. Every function is differentiable by
autograd where the mathematics is.

NaN and infinity follow one rule. A key is masked where its score is -inf: it has weight 0, and a
product leaves it out whatever its value is. A row of masked keys is empty: weights 0, logsumexp
-inf. A row with a score of NaN or +inf at another key is undefined: its weights are NaN there.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """A whole attention matrix: scores and weights, each (..., num_heads, q_len, kv_len).

    A sink, (..., num_heads, 1, 1), is a logit that stands in the denominator of every row.
    """

    scores: Tensor
    weights: Tensor
    sink: Tensor | None = None

    @property
    def masked(self) -> Tensor:
        return self.scores == -torch.inf

    @property
    def undefined(self) -> Tensor:
        """Rows without a softmax, (..., q_len): a score, or the sink of a row with keys, is one."""
        bad = self.scores.isnan() | (self.scores == torch.inf)
        if self.sink is not None:
            bad = bad | ((self.sink.isnan() | (self.sink == torch.inf)) & ~self.masked)
        return bad.any(-1)


class Top(NamedTuple):
    values: Tensor
    indices: Tensor


def repeated(kv_tensor: Tensor, num_heads: int) -> Tensor:
    """Grouped key or value heads, each repeated for the query heads that share it."""
    if kv_tensor.ndim < 3 or kv_tensor.shape[-3] == 1:
        return kv_tensor
    return kv_tensor.repeat_interleave(num_heads // kv_tensor.shape[-3], dim=-3)


def attend(
    query: Tensor,
    key: Tensor,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
    softcap: float | None = None,
    sink_bias: Tensor | None = None,
) -> Dense:
    """softmax(softcap(score_mod(scale * query @ key.T + bias)), masked), in the inputs' dtype.

    score_mod takes all scores at once here; sink_bias is (num_heads,).
    """
    if query.ndim > 2:
        key = repeated(key, query.shape[-3])
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.mT) * factor
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if score_mod is not None:
        scores = score_mod(scores).to(scores.dtype)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink_bias is not None:
        sink_bias = sink_bias.reshape((-1, 1, 1)[-scores.ndim :])
    return softmax(scores, allowed, sink_bias)


def softmax(scores: Tensor, allowed: Tensor | None = None, sink: Tensor | None = None) -> Dense:
    """The softmax over the keys; a masked key has weight 0, also in a row without others."""
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    masked = scores == -torch.inf
    empty = masked.all(-1, keepdim=True)
    logits = torch.where(empty, 0.0, scores)
    if sink is not None:
        logits = torch.cat([logits, sink.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(logits, -1)[..., : scores.shape[-1]]
    return Dense(scores, torch.where(masked, 0.0, weights), sink)


def double(tensor: Tensor | None) -> Tensor | None:
    """The same rounded numbers in float64, with a gradient of their own where they had one."""
    if tensor is None:
        return None
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


# Masks: True = may attend. Both ends are aligned (bottom right) unless the name says otherwise.


def positions(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """The position of each query on the axis of the keys, and that of each key."""
    return torch.arange(q_len)[:, None] + (kv_len - q_len), torch.arange(kv_len)[None, :]


def causal(q_len: int, kv_len: int) -> Tensor:
    query, key = positions(q_len, kv_len)
    return key <= query


def causal_top_left(q_len: int, kv_len: int) -> Tensor:
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril()


def window(q_len: int, kv_len: int, left: int, right: int) -> Tensor:
    query, key = positions(q_len, kv_len)
    return ((query - key) <= left) & ((key - query) <= right)


def padding(lengths: Sequence[int], shape: Sequence[int]) -> Tensor:
    """One length for each entry of the first axis of a matrix of this shape."""
    columns = torch.arange(shape[-1]).expand(*shape)
    ends = torch.tensor(lengths).reshape(-1, *(1,) * (len(shape) - 1))
    return columns < ends


def documents(ids: Sequence[int] | Sequence[Sequence[int]], shape: Sequence[int]) -> Tensor:
    """Pair by pair; one row of ids for each entry of the first axis, or one for all."""
    of_keys = torch.tensor(ids).reshape(-1, *(1,) * (len(shape) - 2), shape[-1])
    shift = shape[-1] - shape[-2]
    allowed = torch.zeros(*of_keys.shape[:-2], *shape[-2:], dtype=torch.bool)
    for query in range(max(0, -shift), shape[-2]):
        allowed[..., query, :] = of_keys[..., 0, :] == of_keys[..., 0, query + shift, None]
    return allowed


def pointwise(allowed: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
    """A mask_mod of b, h, q_idx and kv_idx, which count through all batch axes, asked at once."""
    four = (math.prod(shape[:-3]), math.prod(shape[-3:-2]), *shape[-2:])
    indices = torch.meshgrid(*(torch.arange(n) for n in four), indexing="ij")
    return allowed(*indices).reshape(shape)


# Position biases.


def alibi(slopes: Tensor, q_len: int, kv_len: int) -> Tensor:
    """-slope * distance, (num_heads, q_len, kv_len)."""
    query, key = positions(q_len, kv_len)
    return -slopes[:, None, None] * (key - query).abs()


def t5_bias(
    table: Tensor, q_len: int, kv_len: int, *, bidirectional: bool, max_distance: int
) -> Tensor:
    """table[bucket of the distance], (num_heads, q_len, kv_len); one distance at a time."""
    query, key = positions(q_len, kv_len)
    sides = 2 if bidirectional else 1

    def bucket(distance: int) -> int:
        here = table.shape[0] // sides
        after = here if bidirectional and distance > 0 else 0
        away = abs(distance) if bidirectional else max(-distance, 0)
        if away < here // 2:
            return after + away
        share = math.log(away / (here // 2)) / math.log(max_distance / (here // 2))
        return after + min(here // 2 + int(share * (here - here // 2)), here - 1)

    buckets = [[bucket(distance) for distance in row] for row in (key - query).tolist()]
    return table[torch.tensor(buckets)].permute(2, 0, 1)


# Reductions, each of a whole matrix.


def logsumexp(dense: Dense) -> Tensor:
    empty = dense.masked.all(-1)
    of_keys = torch.where(empty[..., None], 0.0, dense.scores).logsumexp(-1)
    if dense.sink is not None:
        of_keys = torch.logaddexp(of_keys, dense.sink[..., 0].to(of_keys.dtype))
    return torch.where(empty, -torch.inf, of_keys)


def max_score(dense: Dense) -> Tensor:
    empty = dense.masked.all(-1)
    return torch.where(empty, -torch.inf, dense.scores.amax(-1))


def entropy(dense: Dense) -> Tensor:
    return torch.special.entr(dense.weights).sum(-1)


def entropy_from_scores(dense: Dense) -> Tensor:
    """The same entropy with a gradient where weights underflow to 0: sum of w * (lse - score)."""
    below = logsumexp(dense)[..., None] - dense.scores
    below = torch.where(dense.weights > 0, below, 0.0)
    return (dense.weights * below).sum(-1)


def topk(dense: Dense, k: int) -> Top:
    """Falling weights; among equal scores the lowest index first; index -1 for a masked key.

    An undefined row has no order: its values are NaN and its indices -1.
    """
    indices = dense.scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    values = dense.weights.gather(-1, indices)
    undefined = dense.undefined[..., None]
    without_key = dense.masked.gather(-1, indices) | undefined
    return Top(torch.where(undefined, torch.nan, values), indices.masked_fill(without_key, -1))


def pool(dense: Dense, rows: int, columns: int) -> Tensor:
    """The mean weight in each cell, cell by cell."""
    weights = dense.weights
    row_edges = _edges(weights.shape[-2], rows)
    column_edges = _edges(weights.shape[-1], columns)
    cells = [
        [weights[..., top:bottom, left:right].mean((-2, -1)) for left, right in column_edges]
        for top, bottom in row_edges
    ]
    return torch.stack([torch.stack(row, -1) for row in cells], -2)


def _edges(length: int, wanted: int) -> list[tuple[int, int]]:
    cells = min(length, wanted)
    return [(i * length // cells, (i + 1) * length // cells) for i in range(cells)]


def segments(
    dense: Dense, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]]
) -> Tensor:
    """Summed over the keys of a span, in the mean over the queries of a span."""
    rows = [[dense.weights[..., a:b, c:d].sum(-1).mean(-1) for c, d in keys] for a, b in queries]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def diagonal(dense: Dense, offset: int) -> Tensor:
    return dense.weights.diagonal(offset, dim1=-2, dim2=-1)


def product(dense: Dense, value: Tensor) -> Tensor:
    """weights @ value."""
    return _times(dense.weights, value, dense.masked)


def transposed_product(dense: Dense, operand: Tensor) -> Tensor:
    """weights transposed @ operand."""
    return _times(dense.weights.mT, operand, dense.masked.mT)


def _times(weights: Tensor, operand: Tensor, masked: Tensor) -> Tensor:
    if operand.ndim == 1:
        return _times(weights, operand[:, None], masked)[..., 0]
    operand = repeated(operand, weights.shape[-3] if weights.ndim > 2 else 1)
    if bool(operand.isfinite().all()):
        return weights @ operand
    terms = weights[..., None] * operand[..., None, :, :]  # (..., rows, columns, width)
    return torch.where(masked[..., None], 0.0, terms).sum(-2)


# The budget.


# design.md: sums and pools to 1e-5 relative in float32, which is this many roundings; sums of
# hundreds of numbers, one after another, need some of them.
SUM_ROUNDINGS = 84


def allowed_error(
    exact: Tensor,
    plain: Tensor,
    *,
    dtype: torch.dtype,
    scores: float,
    unit: float | None = None,
    roundings: int = 1,
) -> float:
    """The largest error an answer may have: twice that of plain PyTorch, plus one rounding.

    On a few numbers plain PyTorch has no error by luck, so what the rounding of a score costs is
    allowed whatever its error was: an error e of a score is a relative error e of its weight.

    Args:
        exact: the answer of the oracle in float64, on the same rounded inputs.
        plain: the answer of plain PyTorch on them.
        dtype: of the answer.
        scores: how large a score can be.
        unit: what an error of a score is multiplied with in the answer: its size when left out.
        roundings: how many roundings of the answer; SUM_ROUNDINGS for sums.
    """
    size = largest(exact)
    twice = 2 * largest(finite(plain).double() - finite(exact))
    accumulated = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    of_scores = 2 * accumulated * (1 + scores) * (size if unit is None else unit)
    return twice + roundings * torch.finfo(dtype).eps * size + of_scores


def assert_close(actual: Tensor, exact: Tensor, within: float) -> None:
    """That an answer equals the exact one up to an absolute error; infinities and NaN exactly.

    Raises:
        AssertionError: it does not, with the place and the size of the largest error.
    """
    assert actual.shape == exact.shape, f"{tuple(actual.shape)} instead of {tuple(exact.shape)}"
    same = _special(actual) == _special(exact)
    assert bool(same.all()), f"infinite or NaN where it should not be, or finite: {actual}, {exact}"
    error = (finite(actual).double() - finite(exact).double()).abs()
    worst = largest(error)
    assert worst <= within, (
        f"error {worst:.3g} is more than {within:.3g}, at flat position {int(error.argmax())}: "
        f"{actual.flatten()[error.argmax()].item()!r} instead of "
        f"{exact.flatten()[error.argmax()].item()!r}"
    )


def finite(tensor: Tensor) -> Tensor:
    """The tensor with 0 where it is infinite or NaN; no gradient flows through those."""
    return torch.where(torch.isfinite(tensor), tensor, 0.0)


def _special(tensor: Tensor) -> Tensor:
    """0 for a number, else which of inf, -inf, NaN."""
    return tensor.isposinf() + 2 * tensor.isneginf() + 3 * tensor.isnan()


def largest(tensor: Tensor) -> float:
    """The size of the largest finite number; 0 without any."""
    return float(finite(tensor.detach()).abs().max()) if tensor.numel() else 0.0


def gradients(
    answer: Callable[..., Tensor], inputs: Sequence[Tensor], seed: int = 0
) -> list[Tensor]:
    """The gradients of the answer times fixed random numbers; infinite answers are left out."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = finite(answer(*leaves))
    arriving = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed))
    found = torch.autograd.grad(result, leaves, arriving.to(result.dtype), allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]
