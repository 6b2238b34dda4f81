"""The facts of an attention: the formula that its numbers follow."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.facts.arguments import Hiding, Mask, mask_of, readings_of
from regard.diagnosis.facts.paths import Factor, Operation, Part, Rotation
from regard.diagnosis.facts.rows import Mistake, Rows, Unread
from regard.diagnosis.facts.surroundings import Surroundings
from regard.diagnosis.facts.visible import Table

_CLOSE = 1e-7
_SAME_SCALE = 1e-4


def is_same_scale(scale: float, other: float) -> bool:
    """Return True if two scales differ by rounding alone."""
    return math.isclose(scale, other, rel_tol=_SAME_SCALE)


def mistake_of_scale(scales: Iterable[float], embed_dims: Iterable[int]) -> str:
    """Return the name of the mistake of scales that are not 1/√head_dim.

    Args:
        scales: of the heads.
        embed_dims: of all heads together, and of the tokens.
    """
    scales = [*scales]

    def are_all(number: float) -> bool:
        return all(is_same_scale(scale, number) for scale in scales)

    if are_all(1.0):
        return "no-scale"
    is_of_embed_dim = any(are_all(embed_dim**-0.5) for embed_dim in embed_dims if embed_dim)
    return "scale-by-embed-dim" if is_of_embed_dim else "wrong-scale"


@dataclass(frozen=True, eq=False)
class Bias:
    """Numbers that are added to the scores.

    Attributes:
        kind: "alibi": slope · distance; "table": by head, query and key, the same in each sample;
            "finite": one number where it should hide.
        numbers: slopes of heads; the finite number; else empty.
        dense: (heads, q_len, kv_len), each row less a number of its own; the mean of a row is 0.
    """

    kind: str
    numbers: tuple[float, ...]
    dense: Tensor

    def at(self, q_len: int, kv_len: int) -> Tensor | None:
        """Return the numbers for these lengths, less a number of each row; None if unknown."""
        if self.kind == "alibi":
            distance = (torch.arange(kv_len) - torch.arange(q_len)[:, None]).abs().double()
            return torch.tensor(self.numbers, dtype=torch.float64)[:, None, None] * -distance
        if q_len > self.dense.shape[1] or kv_len > self.dense.shape[2]:
            return None
        return self.dense[:, :q_len, :kv_len]


@dataclass(frozen=True)
class AddedPositions:
    """A difference between the projections of equal tokens.

    Attributes:
        kind: "none"; "added": each depends on the position of its own token; "mixed": it depends on
            other tokens.
        equal: the first two tokens that have the same position, from 1; None if all differ.
    """

    kind: str
    equal: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts of one attention.

    Attributes:
        module: the name of its module.
        lines: the ``file:line`` of each stage.
        num_heads: the number of heads.
        key_heads: the index of the key head of each head.
        head_dim: the number of columns of a head.
        scale: the factor of query · key of each head, all factors together.
        softcap: the cap of the scores; None without one.
        mask: the rule of visible keys; None if no rule gives them.
        bias: numbers added to the scores; None without any.
        sink: the number beside the scores of each head; empty if none takes part in the softmax.
        query: the operations from the projection to the query.
        key: those to the key.
        value: those to the value.
        inner_scale: the factor of the product of query and key as they meet, of each head.
        masked: the mask where an argument that is a mask is passed, by the argument.
        key_masks: those of these arguments that hide keys, and not pairs of query and key.
        consistent_readings: of each argument that was passed and may hide keys, the readings by
            which it hides no key that is visible.
        added_positions: what tells equal tokens apart; None if that is unknown.
        has_given_scores: the code is given scores, and ``scale`` is what it multiplies them by.
        fills_empty_rows: a query to which the mask leaves no key sees every key.
        around: its projections, its heads and its output.
    """

    module: str
    lines: Mapping[str, str]
    num_heads: int
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
    key_masks: frozenset[str] = frozenset()
    consistent_readings: Mapping[str, frozenset[str]] = field(
        default_factory=dict[str, frozenset[str]]
    )
    added_positions: AddedPositions | None = None
    has_given_scores: bool = False
    fills_empty_rows: bool = False
    around: Surroundings = field(default_factory=Surroundings)

    @property
    def num_kv_heads(self) -> int:
        """The number of heads of keys."""
        return len(set(self.key_heads))

    @property
    def standard_scale(self) -> float:
        """The scale of standard attention: 1/√head_dim; 1 of scores that are given."""
        return 1.0 if self.has_given_scores else self.head_dim**-0.5

    @property
    def has_one_scale(self) -> bool:
        """True if all heads have the same scale."""
        return max(self.scale) - min(self.scale) <= _SAME_SCALE * abs(self.scale[0])

    @property
    def hidings(self) -> list[Hiding]:
        """The arguments that hide keys in one of the masks, with how they do it."""
        masks = [*filter(None, [self.mask]), *self.masked.values()]
        return [*dict.fromkeys(hiding for mask in masks for hiding in mask.hidings)]

    def has_scale(self, scale: float) -> bool:
        """Return True if each head has a scale."""
        return all(is_same_scale(number, scale) for number in self.scale)

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
            bias = self.bias.at(q_len, kv_len)
            if bias is None:
                return None
            scores = scores + bias
        visible = mask.dense(arguments, scores.shape)
        if visible is None:
            return None
        scores = scores.masked_fill(~visible, -math.inf)
        if self.sink:
            column = torch.tensor(self.sink, dtype=torch.float64)[:, None, None]
            scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :kv_len].nan_to_num(0.0)

    def has_paths(self, rows: Rows) -> bool:
        """Return True if rows have its heads, and its paths to query, key and value."""
        heads = (rows.module, rows.query.shape[1], rows.head_map, rows.query.shape[-1])
        return heads == (self.module, self.num_heads, self.key_heads, self.head_dim) and all(
            _are_equal(operations, path.operations or ())
            for operations, path in zip((self.query, self.key, self.value), rows.paths, strict=True)
        )


def _are_equal(first: tuple[Operation, ...], second: tuple[Operation, ...]) -> bool:
    return len(first) == len(second) and all(map(_is_equal, first, second))


def _is_equal(first: Operation, second: Operation) -> bool:
    """Return True if two operations are equal, to the rounding of float32."""
    match first, second:
        case Factor(), Factor():
            return math.isclose(first.factor, second.factor, rel_tol=1e-6)
        case Rotation(), Rotation():
            angles = zip(first.angles, second.angles, strict=True)
            return (
                (first.pairing, first.part) == (second.pairing, second.part)
                and math.isclose(first.start, second.start, abs_tol=1e-3)
                and all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in angles)
            )
        case Part(), Part():
            paths = zip(first.paths, second.paths, strict=False)
            return len(first.paths) == len(second.paths) and all(
                _are_equal(a.operations or (), b.operations or ()) for a, b in paths
            )
        case _:
            return first == second


def facts_of(rows: Rows, arguments: Mapping[str, Tensor]) -> Facts:
    """Return the facts of an attention.

    Args:
        rows: its numbers.
        arguments: tensors of the call that may be masks, by name.

    Raises:
        Unread: no formula of the grammar gives its weights.
    """
    weights, visible, empty = rows.weights, rows.visible, rows.is_empty
    if not bool((weights >= 0).all()):
        raise Unread("softmax", "some weights are below 0, or NaN")
    sums = weights.sum(-1, keepdim=True)
    if bool((sums > 1 + _CLOSE).any()):
        reason = "some rows of weights sum to more than 1"
        mistake = Mistake("weights", f"{reason.capitalize()}.", is_choice=True)
        raise Unread("softmax", reason, "", [mistake])
    product = rows.query @ rows.key.mT
    # The logarithm of the weights is the scores less one number for each row.
    logs = torch.where(visible, weights.log(), 0.0)
    fitted = fitted_scores(product, logs, visible)
    if fitted is None:
        raise Unread("scores", "the scores are no multiple of query · key, plus numbers")
    scale, cap, plain = fitted
    remainder = _centred(logs - plain, visible)
    bias = _bias(remainder, visible)
    scores = plain if bias is None else plain + remainder
    scores = scores.masked_fill(~visible, -math.inf)
    sink: tuple[float, ...] = ()
    if bool(((sums < 1 - _CLOSE) & ~empty).any()):
        sink, column = _sink(scores, logs, sums, visible)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    softmax = scores.softmax(-1)[..., : weights.shape[-1]]
    if not torch.allclose(torch.where(empty, weights, softmax), weights, rtol=0, atol=1e-9):
        raise Unread("softmax", "the weights are no softmax of the scores")
    factor = factor_of(rows)
    query, key, value = (path.operations or () for path in rows.paths)
    return Facts(
        module=rows.module,
        lines=rows.lines,
        num_heads=rows.query.shape[1],
        key_heads=rows.head_map,
        head_dim=rows.query.shape[-1],
        scale=tuple(each * factor for each in scale),
        softcap=cap,
        mask=mask_of(visible, arguments, empty),
        bias=bias,
        sink=sink,
        query=query,
        key=key,
        value=value,
        inner_scale=scale,
        consistent_readings=consistent_readings(rows, arguments),
    )


def factor_of(rows: Rows) -> float:
    """Return what queries and keys were multiplied by before they met, both together."""
    return math.prod(
        operation.factor
        for path in rows.paths[:2]
        for operation in path.operations or ()
        if isinstance(operation, Factor)
    )


def consistent_readings(rows: Rows, arguments: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return the readings of each argument by which it hides keys, and none that is visible."""
    visible = rows.visible
    consistent: dict[str, frozenset[str]] = {}
    for name, argument in arguments.items():
        readings = {
            reading: not bool((visible & ~kept).any())
            for reading, kept in readings_of(argument, visible.shape)
            if not bool(kept.expand(visible.shape).all())
        }
        if readings:
            consistent[name] = frozenset(reading for reading, fits in readings.items() if fits)
    return consistent


def mask_in(rows: Rows, arguments: Mapping[str, Tensor]) -> Mask | None:
    """Return the mask of an attention alone; None if no rule gives it."""
    return mask_of(rows.visible, arguments, rows.is_empty)


def table_in(rows: Rows) -> Mask | None:
    """Return the mask that lets each query see the same keys in all samples and heads; or None."""
    table = rows.visible[0, 0]
    return Mask(Table(table)) if bool((rows.visible == table).all()) else None


def _centred(numbers: Tensor, visible: Tensor) -> Tensor:
    """Return numbers less the mean of each row; 0 where a key is masked."""
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(visible, numbers, 0.0).sum(-1, keepdim=True) / count
    return torch.where(visible, numbers - mean, 0.0)


def fitted_scores(
    product: Tensor, logs: Tensor, visible: Tensor
) -> tuple[tuple[float, ...], float | None, Tensor] | None:
    """Return the scale of each head, the cap and the scores that they give; None if none fit."""
    scale, cap = _fitted_scale(product, logs, visible), None
    if scale is None and (capped := _capped(product, logs, visible)) is not None:
        scale, cap = capped
    if scale is None:
        return None
    scores = product * torch.tensor(scale, dtype=torch.float64)[:, None, None]
    return scale, cap, scores if cap is None else cap * (scores / cap).tanh()


def _fitted_scale(product: Tensor, logs: Tensor, visible: Tensor) -> tuple[float, ...] | None:
    """Return the number c of each head of scores = c · product + what all samples have alike.

    Args:
        product: query · key, (samples, heads, q_len, kv_len).
        logs: the logarithms of the weights.
        visible: the keys that count.
    """
    if len(product) > 1:
        both = visible[0] & visible[1]
        x, y = (_centred(t[0] - t[1], both) for t in (product, logs))
    else:
        x, y = (_centred(t[0], visible[0]) for t in (product, logs))
    scales: list[float] = []
    for head in range(x.shape[0]):
        square = float(x[head].square().sum())
        if square == 0.0:
            return None
        scale = float((x[head] * y[head]).sum()) / square
        size = max(1.0, float(y[head].abs().max()))
        if not bool(((y[head] - scale * x[head]).abs() <= _CLOSE * size).all()):
            return None
        scales.append(scale)
    return tuple(scales)


def _capped(
    product: Tensor, logs: Tensor, visible: Tensor
) -> tuple[tuple[float, ...], float] | None:
    """Return scale a and cap c of scores = c · tanh(a · product / c), by least squares.

    Numbers that are added after the cap are the same in two samples, so their difference lacks
    them. One sample alone is read as if nothing was added.
    """
    visible, product, logs = visible[:2].all(0), product[:2], logs[:2]
    if int(visible.sum()) < 3:
        return None

    def terms_of(*numbers: Tensor) -> Tensor:
        """Return numbers (samples, heads, q_len, kv_len) as columns, less all that rows share."""
        gaps = (t[0] if len(t) == 1 else t[0] - t[1] for t in numbers)
        return torch.stack([_centred(gap, visible)[visible] for gap in gaps], -1)

    y = terms_of(logs)[:, 0]
    # The first two terms of the series, a·x - (a³/3c²)·x³, are where to begin.
    linear, cubic = _least_squares(terms_of(product, product**3), y)
    if not linear > 0 or not cubic < 0:
        return None
    scale, inverse = linear, math.sqrt(-3 * cubic / linear**3)
    for _ in range(100):
        tanh = (scale * inverse * product).tanh()
        by_scale = product * (1 - tanh.square())
        by_inverse = (scale * by_scale - tanh / inverse) / inverse
        terms = terms_of(by_scale, by_inverse)
        if not bool(terms.isfinite().all()):
            return None
        step = _least_squares(terms, y - terms_of(tanh / inverse)[:, 0])
        scale, inverse = scale + step[0], abs(inverse + step[1])
        if not (math.isfinite(scale) and math.isfinite(inverse)) or not inverse:
            return None
        if abs(step[0]) < 1e-13 * abs(scale) and abs(step[1]) < 1e-11 * inverse:
            break
    scores = terms_of((scale * inverse * product).tanh() / inverse)[:, 0]
    if not bool(((y - scores).abs() <= 1e-9 * max(1.0, float(y.abs().max()))).all()):
        return None
    return (scale,) * product.shape[1], 1 / inverse


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
    has_keys = visible.any(-1, keepdim=True)
    total = torch.where(visible, scores - logs, 0.0).sum(-1, keepdim=True)
    total = total / visible.sum(-1, keepdim=True).clamp(min=1)  # the row's logsumexp
    column = (1 - sums).log() + total
    of_heads = [column[:, head][has_keys[:, head]] for head in range(column.shape[1])]
    if any(len(rows) and float(rows.max() - rows.min()) > 1e-6 for rows in of_heads):
        raise Unread("softmax", "the rows of weights sum to less than 1, each in its own way")
    numbers = [float(rows.mean()) for rows in of_heads]
    return tuple(numbers), torch.tensor(numbers, dtype=torch.float64)[:, None, None]


def _bias(remainder: Tensor, visible: Tensor) -> Bias | None:
    """Return the bias that leaves a remainder of the scores, which has the mean 0 in each row."""
    size = max(1.0, float(remainder.abs().max()))
    if bool((remainder.abs() <= _CLOSE * size).all()):
        return None
    bias, known = _of_all_samples(remainder, visible, size)
    heads, q_len, kv_len = bias.shape
    distance = torch.arange(kv_len) - torch.arange(q_len)[:, None]
    falling = _centred(-distance.abs().double().expand_as(bias), known)
    slopes = [float((falling[h] * bias[h]).sum() / falling[h].square().sum()) for h in range(heads)]
    alibi = falling * torch.tensor(slopes, dtype=torch.float64)[:, None, None]
    if bool(((bias - alibi).abs() <= 1e-6 * size).all()):
        return Bias("alibi", tuple(slopes), bias)
    if (number := _only_number(bias, known)) is not None:
        return Bias("finite", (number,), bias)
    return Bias("table", (), bias)


def _of_all_samples(remainder: Tensor, visible: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return the remainder that all samples have in common, and where it is known.

    Each sample may have its own mask: where the visible keys of two of them overlap, their numbers
    agree but for a number of each row.
    """
    common, known = remainder[0].clone(), visible[0].clone()
    for sample, sample_visible in zip(remainder[1:], visible[1:], strict=True):
        overlap = known & sample_visible
        count = overlap.sum(-1, keepdim=True)
        gap = torch.where(overlap, sample - common, 0.0)
        shift = gap.sum(-1, keepdim=True) / count.clamp(min=1)
        if not bool(((gap - shift).abs() <= _CLOSE * size)[overlap].all()):
            raise Unread(
                "scores", "the numbers that are added to the scores differ between samples"
            )
        new = sample_visible & ~known & (count > 0)
        common = torch.where(new, sample - shift, common)
        known = known | new
    return _centred(common, known), known


def _only_number(bias: Tensor, known: Tensor) -> float | None:
    """Return the number that is added to some scores of a row and not to the rest of it."""
    gap = torch.where(known, bias, -math.inf).amax(-1, keepdim=True) - bias
    gap = torch.where(known, gap, 0.0)
    numbers = gap[gap > 1e-6]
    is_one = len(numbers) and float(numbers.max() - numbers.min()) <= 1e-6 * float(numbers.max())
    return -float(numbers.mean()) if is_one else None
