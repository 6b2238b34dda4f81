"""The steps of one query, for some of its keys: the numbers of the page's Steps view."""

from math import isfinite
from typing import Any, Literal, cast

import torch
from torch import Tensor

from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.masked_product import masked_product
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.view.row_steps import query_row

_STEPS = {"dot": "query·key", **{name: name for name in ("scaled", "biased", "modified", "capped")}}


def query_steps(
    matrix: AttentionMatrix,
    query: int,
    by: Literal["weight", "position"],
    start: int,
    count: int,
    value: Tensor | None = None,
) -> dict[str, Any]:
    """Return the steps of one query, as ``row_steps.ts`` documents them.

    None stands for a step that does nothing, and for a number that is not known or not finite,
    which JSON cannot write.

    Args:
        matrix: the head, (q_len, kv_len); keys that are set aside count as masked.
        query: which row.
        by: the order of the keys. "weight": the strongest first, equal ones as in the text;
            "position": as in the text.
        start: the first place of that order.
        count: how many keys are returned.
        value: of every key, (kv_len, value_dim).
    """
    source = matrix.source
    row = query_row(source, matrix.mask, query)
    weight, allowed = row.weight(row.score), row.score != -torch.inf
    order = torch.arange(len(weight), device=weight.device)
    if by == "weight":
        order = weight.sort(descending=True, stable=True).indices
    chosen = order[start : start + count]
    has_vectors = isinstance(source, QueryKeyScores)
    is_score_known = not (isinstance(source, GivenScores) and source.are_weights)
    columns: dict[str, list[Any]] = {
        "key": chosen.tolist(),
        "vector": _vectors(source.key[chosen]) if has_vectors else [None] * len(chosen),
    }
    for name, step in _STEPS.items():
        columns[name] = _finite(row.columns.get(step), chosen)
    columns["allowed"] = allowed[chosen].tolist()
    columns["score"] = _finite(row.score if is_score_known else None, chosen)
    columns["weight"] = weight[chosen].tolist()
    columns["value"] = [None] * len(chosen) if value is None else _vectors(value[chosen])
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    is_known = is_score_known and isfinite(row.maximum)
    output = None
    if value is not None:
        product = masked_product(weight[None], value.to(weight.dtype), lambda: allowed[None])
        output = _vectors(product)[0]
    return {
        "vector": source.query[query].tolist() if has_vectors else None,
        "scale": source.scale if has_vectors else 1.0,
        "masked": not bool(allowed.all()),
        "maximum": float(row.maximum) if is_known else None,
        "log_normalizer": float(row.log_normalizer) if is_known else None,
        "sink": None if row.sink is None else float(row.sink),
        "keys": len(weight),
        "allowed": int(allowed.sum()),
        "total": float(weight.sum()),
        "rows": rows,
        "output": output,
    }


def _vectors(tensor: Tensor) -> list[list[float] | None]:
    """Return each row as a list, or None if it has a number that is not finite."""
    return [cast(list[float], row.tolist()) if row.isfinite().all() else None for row in tensor]


def _finite(numbers: Tensor | None, places: Tensor) -> list[float | None]:
    """Return the numbers at some positions, or None if unknown or not finite."""
    if numbers is None:
        return [None] * len(places)
    chosen = cast(list[float], numbers[places].tolist())
    return [number if isfinite(number) else None for number in chosen]
