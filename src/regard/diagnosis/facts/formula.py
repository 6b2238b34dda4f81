"""The facts of an attention: the formula that its numbers follow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.facts.arguments import Mask, mask_of, readings_of
from regard.diagnosis.facts.paths import Factor, Norm, Operation, Part, Rotation
from regard.diagnosis.facts.rows import Rows, Unread

__all__ = ["Bias", "Facts", "consistent", "facts_of", "is_empty", "mask_in"]

_LOW = 1e-300
"""A weight below it is that of a masked key."""
_CLOSE = 1e-7


@dataclass(frozen=True, eq=False)
class Bias:
    """Numbers that are added to the scores.

    Attributes:
        kind: "alibi": slope · distance; "distance": by head and distance; "table": by head, query
            and key, the same in each sample; "finite": one number where it should hide.
        numbers: slopes of heads; the finite number; else empty.
        dense: (heads, q_len, kv_len), each row less a number of its own; the mean of a row is 0.
        seen: the keys that it is known for.
    """

    kind: str
    numbers: tuple[float, ...]
    dense: Tensor
    seen: Tensor

    def at(self, q_len: int, kv_len: int) -> Tensor | None:
        """Return the numbers for these lengths, less a number of each row; None if unknown."""
        if self.kind == "alibi":
            away = -(torch.arange(kv_len) - torch.arange(q_len)[:, None]).abs().double()
            return torch.tensor(self.numbers, dtype=torch.float64)[:, None, None] * away
        if q_len > self.dense.shape[1] or kv_len > self.dense.shape[2]:
            return None
        return self.dense[:, :q_len, :kv_len]


@dataclass(frozen=True, eq=False)
class Facts:
    """What one attention of a run computes.

    Attributes:
        module: its name.
        lines: the ``file:line`` of each stage.
        heads: how many.
        key_heads: the number of the key head of each head.
        head_dim: the columns of a head.
        scale: what multiplies query · key, of each head, all factors together.
        softcap: the cap of the scores.
        mask: the rule of visible keys; None if no rule gives them.
        bias: numbers added to the scores.
        sink: the number beside the scores of each head, where one takes part in the softmax.
        query: the way from the projection to the query.
        key: likewise.
        value: likewise.
        inner_scale: what multiplies the product of query and key as they meet.
        masked: the mask where an argument that is a mask is passed, by the argument.
        of_keys: those of these arguments that hide keys, and not pairs of query and key.
        of_pairs: those of these arguments that hide pairs of query and key.
        consistent: of each argument that was passed and may hide keys, the readings by which it
            hides no key that is visible.
        is_merged: the heads of a token come to lie side by side; None if that is unknown.
        adds_positions: tokens that are alike are projected to other queries at other positions;
            None if that is unknown.
        crosses: queries and keys are projected from other tensors.
        is_module: queries are projected, and not given.
        value_heads: the number of the value head of each head.
        shares: pairs of "query", "key" and "value" that are the same numbers: "key value" where
            they are one tensor, "key value layer" where one layer gives both, "query is key" where
            the argument key is taken as the query; "heads" where all heads are alike; "pieces"
            where one matrix projects each piece of a token; "value input" where the value is the
            input itself; "returned" where other weights are given back; "order" where the rows of
            the result are those of other tokens.
    """

    module: str
    lines: Mapping[str, str]
    heads: int
    key_heads: tuple[int, ...]
    head_dim: int
    scale: tuple[float, ...]
    softcap: float | None
    mask: Mask | None
    bias: Bias | None
    sink: tuple[float, ...]
    query: tuple[Operation, ...]
    key: tuple[Operation, ...]
    value: tuple[Operation, ...]
    inner_scale: tuple[float, ...]
    masked: Mapping[str, Mask] = field(default_factory=dict[str, Mask])
    of_keys: frozenset[str] = frozenset()
    of_pairs: frozenset[str] = frozenset()
    consistent: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    is_merged: bool | None = None
    adds_positions: bool | None = None
    crosses: bool = False
    is_module: bool = True
    value_heads: tuple[int, ...] = ()
    shares: tuple[str, ...] = ()

    def weights(
        self, query: Tensor, key: Tensor, mask: Mask | None, arguments: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return the weights that the facts give, (samples, heads, q_len, kv_len).

        Only what is named is used, and nothing that a run recorded. None where the facts do not
        reach these lengths.

        Args:
            query: (samples, heads, q_len, head_dim).
            key: (samples, heads, kv_len, head_dim).
            mask: that of the call: ``mask``, or one of ``masked``.
            arguments: tensors of the call that may be masks, by name.
        """
        q_len, kv_len = query.shape[-2], key.shape[-2]
        if mask is None:
            return None
        scores = query @ key.mT
        scores = scores * torch.tensor(self.inner_scale, dtype=torch.float64)[:, None, None]
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.bias is not None:
            added = self.bias.at(q_len, kv_len)
            if added is None:
                return None
            scores = scores + added
        seen = mask.dense(arguments, scores.shape)
        if seen is None:
            return None
        scores = scores.masked_fill(~seen, -math.inf)
        if self.sink:
            own = torch.tensor(self.sink, dtype=torch.float64)[:, None, None]
            scores = torch.cat([scores, own.expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :kv_len].nan_to_num(0.0)

    def same_ways(self, other: "Facts") -> bool:
        """Return True if heads and the ways to query, key and value are those of other facts."""
        return (
            (self.module, self.heads, self.key_heads, self.head_dim)
            == (other.module, other.heads, other.key_heads, other.head_dim)
            and _alike(self.query, other.query)
            and _alike(self.key, other.key)
            and _alike(self.value, other.value)
        )


def _alike(some: tuple[Operation, ...], others: tuple[Operation, ...]) -> bool:
    return len(some) == len(others) and all(map(_same, some, others))


def _same(one: Operation, other: Operation) -> bool:
    """Return True if two operations are the same one, to the rounding of float32."""
    match one, other:
        case Factor(), Factor():
            return math.isclose(one.factor, other.factor, rel_tol=1e-6)
        case Norm(), Norm():
            return one == other
        case Rotation(), Rotation():
            known = (one.pairing, one.part) == (other.pairing, other.part)
            pairs = zip(one.angles, other.angles, strict=True)
            return (
                known
                and math.isclose(one.start, other.start, abs_tol=1e-3)
                and all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in pairs)
            )
        case Part(), Part():
            pairs = zip(one.paths, other.paths, strict=False)
            return len(one.paths) == len(other.paths) and all(
                _alike(a.operations or (), b.operations or ()) for a, b in pairs
            )
        case _:
            return False


def facts_of(rows: Rows, arguments: Mapping[str, Tensor]) -> Facts:
    """Return the facts of an attention.

    Args:
        rows: its numbers.
        arguments: tensors of the call that may be masks, by name.

    Raises:
        Unread: no formula of the grammar gives its weights.
    """
    formula = _formula(rows.query, rows.key, rows.weights, arguments)
    factor = 1.0
    for path in rows.paths[:2]:
        for operation in path.operations or ():
            factor *= operation.factor if isinstance(operation, Factor) else 1.0
    query, key, value = (path.operations or () for path in rows.paths)
    return Facts(
        rows.module,
        rows.lines,
        rows.query.shape[1],
        rows.head_map,
        rows.query.shape[-1],
        tuple(scale * factor for scale in formula.scale),
        formula.softcap,
        formula.mask,
        formula.bias,
        formula.sink,
        query,
        key,
        value,
        formula.scale,
    )


@dataclass(frozen=True, eq=False)
class _Formula:
    scale: tuple[float, ...]
    softcap: float | None
    mask: Mask | None
    bias: Bias | None
    sink: tuple[float, ...]


def _formula(
    query: Tensor, key: Tensor, weights: Tensor, arguments: Mapping[str, Tensor]
) -> _Formula:
    """Return the formula of weights, (samples, heads, q_len, kv_len), that is true for all rows."""
    if not bool((weights >= 0).all()):
        raise Unread("softmax", "some weights are below 0, or NaN")
    sums = weights.sum(-1, keepdim=True)
    if bool((sums > 1 + _CLOSE).any()):
        raise Unread("softmax", "some rows of weights sum to more than 1")
    product = query @ key.mT
    visible, empty = _visible(product, weights)
    # The logarithm of the weights is the scores less one number for each row.
    logs = torch.where(visible, weights.log(), 0.0)
    scale, cap = _scale(product, logs, visible), None
    if scale is None and (capped := _capped(product, logs, visible)) is not None:
        scale, cap = capped
    if scale is None:
        raise Unread("scores", "the scores are no multiple of query · key, plus numbers")
    scaled = product * torch.tensor(scale, dtype=torch.float64)[:, None, None]
    plain = scaled if cap is None else cap * (scaled / cap).tanh()
    rest = _centred(logs - plain, visible)
    bias = _bias(rest, visible)
    scores = plain if bias is None else plain + rest
    scores = scores.masked_fill(~visible, -math.inf)
    sink: tuple[float, ...] = ()
    if bool(((sums < 1 - _CLOSE) & ~empty).any()):
        sink, column = _sink(scores, logs, sums, visible)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    made = scores.softmax(-1)[..., : weights.shape[-1]]
    made = torch.where(empty, weights, made)
    if not torch.allclose(made, weights, rtol=0, atol=1e-9):
        raise Unread("softmax", "the weights are no softmax of the scores")
    return _Formula(scale, cap, mask_of(visible, arguments, empty), bias, sink)


def _visible(product: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return which keys have a weight, and the rows that have none."""
    # Where all keys are masked with a finite number, the weights are all alike.
    spread = weights.amax(-1, keepdim=True) - weights.amin(-1, keepdim=True)
    is_even = (spread < 1e-12) & (product.amax(-1, keepdim=True) != product.amin(-1, keepdim=True))
    visible = (weights > _LOW) & ~is_even
    return visible, ~visible.any(-1, keepdim=True)


def is_empty(rows: Rows) -> Tensor:
    """Return which rows see no key, (samples, heads, q_len, 1): of weights 0, or all alike."""
    return _visible(rows.query @ rows.key.mT, rows.weights)[1]


def consistent(rows: Rows, arguments: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return the readings of each argument by which it hides keys, and none that is visible."""
    visible, _ = _visible(rows.query @ rows.key.mT, rows.weights)
    found: dict[str, frozenset[str]] = {}
    for name, given in arguments.items():
        readings = [
            (reading, kept)
            for reading, kept in readings_of(given, visible.shape)
            if not bool(kept.expand(visible.shape).all())
        ]
        if readings:
            fits = (own for own, kept in readings if not bool((visible & ~kept).any()))
            found[name] = frozenset(fits)
    return found


def mask_in(rows: Rows, arguments: Mapping[str, Tensor]) -> Mask | None:
    """Return the mask of an attention alone; None if no rule gives it."""
    visible, empty = _visible(rows.query @ rows.key.mT, rows.weights)
    return mask_of(visible, arguments, empty)


def _centred(numbers: Tensor, visible: Tensor) -> Tensor:
    """Return numbers less the mean of each row; 0 where a key is masked."""
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(visible, numbers, 0.0).sum(-1, keepdim=True) / count
    return torch.where(visible, numbers - mean, 0.0)


def _scale(product: Tensor, logs: Tensor, visible: Tensor) -> tuple[float, ...] | None:
    """Return the number c of each head of scores = c · product + what all samples have alike."""
    if len(product) > 1:
        both = visible[0] & visible[1]
        x, y = (_centred(t[0] - t[1], both) for t in (product, logs))
    else:
        x, y = (_centred(t[0], visible[0]) for t in (product, logs))
    found: list[float] = []
    for head in range(x.shape[0]):
        square = float(x[head].square().sum())
        if square == 0.0:
            return None
        scale = float((x[head] * y[head]).sum()) / square
        size = max(1.0, float(y[head].abs().max()))
        if not bool(((y[head] - scale * x[head]).abs() <= _CLOSE * size).all()):
            return None
        found.append(scale)
    return tuple(found)


def _capped(
    product: Tensor, logs: Tensor, visible: Tensor
) -> tuple[tuple[float, ...], float] | None:
    """Return scale a and cap c of scores = c · tanh(a · product / c), by least squares."""
    seen = visible[0]
    x, y = product[0], _centred(logs[0], seen)
    if int(seen.sum()) < 3:
        return None
    # The first two terms of the series, a·x - (a³/3c²)·x³, are where to begin.
    terms = torch.stack([_centred(x, seen)[seen], _centred(x**3, seen)[seen]], -1)
    first, third = _least_squares(terms, y[seen])
    if not first > 0 or not third < 0:
        return None
    scale, inverse = first, math.sqrt(-3 * third / first**3)
    for _ in range(100):
        inside = (scale * inverse * x).tanh()
        slope = x * (1 - inside.square())
        made = _centred(inside / inverse, seen)
        along = _centred((scale * slope - inside / inverse) / inverse, seen)
        terms = torch.stack([_centred(slope, seen)[seen], along[seen]], -1)
        if not bool(terms.isfinite().all()):
            return None
        step = _least_squares(terms, (y - made)[seen])
        scale, inverse = scale + step[0], abs(inverse + step[1])
        if not (math.isfinite(scale) and math.isfinite(inverse)) or not inverse:
            return None
        if abs(step[0]) < 1e-13 * abs(scale) and abs(step[1]) < 1e-11 * inverse:
            break
    made = _centred((scale * inverse * x).tanh() / inverse, seen)
    if not bool(((y - made).abs() <= 1e-9 * max(1.0, float(y.abs().max()))).all()):
        return None
    return (scale,) * x.shape[0], 1 / inverse


def _least_squares(terms: Tensor, numbers: Tensor) -> tuple[float, float]:
    """Return the factors of two terms, (count, 2), whose sum is nearest to the numbers."""
    solution = cast(Tensor, torch.linalg.lstsq(terms, numbers[:, None]).solution).flatten()
    return float(solution[0]), float(solution[1])


def _sink(
    scores: Tensor, logs: Tensor, sums: Tensor, visible: Tensor
) -> tuple[tuple[float, ...], Tensor]:
    """Return the number of each head beside the scores that takes the rest of each row."""
    if bool((sums >= 1).any()):
        raise Unread("softmax", "some rows of weights sum to 1 and others to less")
    some = visible.any(-1, keepdim=True)
    total = torch.where(visible, scores - logs, 0.0).sum(-1, keepdim=True)
    total = total / visible.sum(-1, keepdim=True).clamp(min=1)  # the row's logsumexp
    column = (1 - sums).log() + total
    of_heads = [column[:, head][some[:, head]] for head in range(column.shape[1])]
    if any(len(own) and float(own.max() - own.min()) > 1e-6 for own in of_heads):
        raise Unread("softmax", "the rows of weights sum to less than 1, each in its own way")
    numbers = [float(own.mean()) for own in of_heads]
    return tuple(numbers), torch.tensor(numbers, dtype=torch.float64)[:, None, None]


def _bias(rest: Tensor, visible: Tensor) -> Bias | None:
    """Return what is added to visible scores; ``rest`` is it, less the mean of each row."""
    size = max(1.0, float(rest.abs().max()))
    if bool((rest.abs() <= _CLOSE * size).all()):
        return None
    own, seen = _of_all_samples(rest, visible, size)
    heads, q_len, kv_len = own.shape
    distance = torch.arange(kv_len) - torch.arange(q_len)[:, None]
    away = _centred(-distance.abs().double().expand_as(own), seen)
    slopes = [float((away[h] * own[h]).sum() / away[h].square().sum()) for h in range(heads)]
    made = away * torch.tensor(slopes, dtype=torch.float64)[:, None, None]
    if bool(((own - made).abs() <= 1e-6 * size).all()):
        return Bias("alibi", tuple(slopes), own, seen)
    if (number := _two_valued(own, seen)) is not None:
        return Bias("finite", (number,), own, seen)
    kind = "distance" if _is_of_distance(own, seen, distance) else "table"
    return Bias(kind, (), own, seen)


def _of_all_samples(rest: Tensor, visible: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return what all samples have, less a number of each row, and where it is known.

    Each sample may have its own mask: where the visible keys of two of them overlap, their numbers
    agree but for a number of each row.
    """
    own, seen = rest[0].clone(), visible[0].clone()
    for other, its in zip(rest[1:], visible[1:], strict=True):
        both = seen & its
        count = both.sum(-1, keepdim=True)
        gap = torch.where(both, other - own, 0.0)
        shift = gap.sum(-1, keepdim=True) / count.clamp(min=1)
        if not bool(((gap - shift).abs() <= _CLOSE * size)[both].all()):
            raise Unread(
                "scores", "the numbers that are added to the scores differ between samples"
            )
        new = its & ~seen & (count > 0)
        own = torch.where(new, other - shift, own)
        seen = seen | new
    return _centred(own, seen), seen


def _two_valued(own: Tensor, seen: Tensor) -> float | None:
    """Return the number that is added to some scores of a row and not to others."""
    spread = torch.where(seen, own, -math.inf).amax(-1, keepdim=True) - own
    spread = torch.where(seen, spread, 0.0)
    numbers = spread[spread > 1e-6]
    is_one = len(numbers) and float(numbers.max() - numbers.min()) <= 1e-6 * float(numbers.max())
    return -float(numbers.mean()) if is_one else None


def _is_of_distance(own: Tensor, seen: Tensor, distance: Tensor) -> bool:
    """Return True if numbers depend on head and distance alone, but for a number of each row."""
    heads, q_len, _ = own.shape
    for head in range(heads):
        table: dict[int, float] = {}
        # Rows overlap in distances, so a row's own number follows from the rows before it.
        for row in range(q_len):
            places = cast(list[int], seen[head, row].nonzero()[:, 0].tolist())
            pairs = [(int(distance[row, at]), float(own[head, row, at])) for at in places]
            known = [table[d] - number for d, number in pairs if d in table]
            shift = known[0] if known else 0.0
            if any(abs(each - shift) > 1e-6 for each in known):
                return False
            for d, number in pairs:
                table.setdefault(d, number + shift)
    return True
