"""The steps of one query, for some of its keys: the numbers of the page's Steps view."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, cast

import torch
from torch import Tensor

from regard.reductions.masked_product import masked_product
from regard.scores.box import Box, cut_whole
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.view.row_steps import RowScores, parts_of
from regard.view.tiles.pyramid import HeadScores

__all__ = ["KeyStep", "KeysAsked", "QuerySteps", "query_steps"]

_STEPS = ("query·key", "scaled", "biased", "modified", "capped")
Vector = tuple[float, ...]


@dataclass(frozen=True)
class KeysAsked:
    """The requested keys of a row, which is never sent completely.

    Attributes:
        by: "weight": the strongest first, equal ones as in the text; "position": as in the text.
        start: the first place of that order.
        count: how many.
    """

    by: Literal["weight", "position"]
    start: int
    count: int


@dataclass(frozen=True)
class KeyStep:
    """One key; None for a step that does nothing, and for what is not known or not finite.

    Attributes:
        key: its place.
        vector: of the key.
        dot: query·key.
        scaled: times the scale.
        biased: plus the bias.
        modified: by a score_mod.
        capped: by a softcap.
        allowed: whether the query may attend to it.
        score: what the softmax is given.
        weight: of the key.
        value: of the key; None where none was kept.
    """

    key: int
    vector: Vector | None
    dot: float | None
    scaled: float | None
    biased: float | None
    modified: float | None
    capped: float | None
    allowed: bool
    score: float | None
    weight: float
    value: Vector | None = None


@dataclass(frozen=True)
class QuerySteps:
    """One query step by step, as row_steps.ts documents it.

    Attributes:
        vector: of the query; None where only scores or weights are known.
        scale: that query·key is multiplied with.
        masked: whether a key is masked.
        maximum: the largest score; None where it is not finite, or not known.
        log_normalizer: log of the sum of exp(score - maximum), the sink's included; None where
            the maximum is None. weight = exp((score - maximum) - log_normalizer).
        sink: the logit in the denominator that belongs to no key.
        keys: how many there are.
        allowed: to how many of them the query may attend.
        total: of the weights.
        rows: the keys that were asked for.
        output: the weights times the values of all keys; None where none were kept.
    """

    vector: Vector | None
    scale: float
    masked: bool
    maximum: float | None
    log_normalizer: float | None
    sink: float | None
    keys: int
    allowed: int
    total: float
    rows: tuple[KeyStep, ...]
    output: Vector | None = None


def query_steps(
    head: HeadScores, query: int, part: KeysAsked, value: Tensor | None = None
) -> QuerySteps:
    """Return the steps of one query.

    Args:
        head: whose query it is; keys that are set aside count as masked.
        query: which row.
        part: which of its keys.
        value: of every key, (kv_len, value_dim).
    """
    source, keys, place = head.source, slice(0, head.shape[1]), slice(query, query + 1)
    sink = head.sink
    row = RowScores(head.window(place, keys)[0], None if sink is None else sink[0])
    score, weight = row.score, row.weight(row.score)
    allowed = score != -torch.inf
    chosen = _chosen(weight, part)
    known = not (isinstance(source, GivenScores) and source.are_weights)
    box = Box((), place, keys)
    numbers = {name: scores.block(box, cut_whole)[0] for name, scores in parts_of(source)}
    vector: Vector | None = None
    vectors: Sequence[Vector | None] = [None] * len(chosen)
    if isinstance(source, QueryKeyScores):
        vector = tuple(_numbers(source.query[query]))
        vectors = _vectors(source.key[chosen])
    steps = [_finite(numbers.get(name), chosen) for name in _STEPS]
    scores = _finite(score if known else None, chosen)
    places, weights = cast("list[int]", chosen.tolist()), _numbers(weight[chosen])
    may = cast("list[bool]", allowed[chosen].tolist())
    values = [None] * len(places) if value is None else _vectors(value[chosen])
    by_key = zip(places, vectors, *steps, may, scores, weights, values, strict=True)
    maximum = float(row.maximum)
    is_known = known and isfinite(maximum)
    return QuerySteps(
        vector=vector,
        scale=source.scale if isinstance(source, QueryKeyScores) else 1.0,
        masked=not bool(allowed.all()),
        maximum=maximum if is_known else None,
        log_normalizer=float(row.log_normalizer) if is_known else None,
        sink=None if sink is None else float(sink),
        keys=keys.stop,
        allowed=int(allowed.sum()),
        total=float(weight.sum()),
        rows=tuple(KeyStep(*each) for each in by_key),
        output=None if value is None else _output(weight, value, allowed),
    )


def _output(weight: Tensor, value: Tensor, allowed: Tensor) -> Vector | None:
    product = masked_product(weight[None], value.to(weight.dtype), lambda: allowed[None])
    return _vectors(product)[0]


def _chosen(weight: Tensor, part: KeysAsked) -> Tensor:
    """Return the positions of the requested keys."""
    places = torch.arange(len(weight), device=weight.device)
    if part.by == "weight":
        places = weight.sort(descending=True, stable=True).indices
    return places[part.start : part.start + part.count]


def _numbers(tensor: Tensor) -> list[float]:
    return cast("list[float]", tensor.tolist())


def _vectors(tensor: Tensor) -> list[Vector | None]:
    """None for one with a number that is not finite: JSON has no name for it."""
    return [tuple(_numbers(each)) if each.isfinite().all() else None for each in tensor]


def _finite(numbers: Tensor | None, places: Tensor) -> list[float | None]:
    """Return the numbers at some positions, or None if unknown or not finite."""
    if numbers is None:
        return [None] * len(places)
    return [number if isfinite(number) else None for number in _numbers(numbers[places])]
