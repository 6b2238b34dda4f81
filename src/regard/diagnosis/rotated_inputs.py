"""Queries and keys as they met: after rotary positions, norms, or whatever else came between."""

import math
from dataclasses import replace

from torch import Tensor

from regard.diagnosis.attention_stages import Stages
from regard.diagnosis.reference_attention import Material, seen_scale
from regard.diagnosis.source_lines import score_product

__all__ = ["largest_score", "met", "turned"]


def turned(stages: Stages, material: Material) -> Material | None:
    """The material with the queries and keys that were multiplied, in place of the projections.

    Turning leaves the length of a query as it is. Where all lengths changed by one factor, that is
    a scale, which is taken out again, so that it counts as one.

    Returns:
        None where no single product of queries and keys was seen.
    """
    pair = met(stages)
    if pair is None or stages.softmax is None:
        return None
    query, key = pair
    factors = [_factor(material, "q", query), _factor(material, "k", key)]
    query, key = (
        tensor if factor is None else tensor / factor
        for tensor, factor in zip((query, key), factors, strict=True)
    )
    width = material.tensors["q"].shape[-1] // material.num_heads
    tensors = {**material.tensors, "q": _joined(query), "k": _joined(key)}
    found = replace(
        material,
        tensors=tensors,
        kv_heads=material.tensors["k"].shape[-1] // width,
        is_turned=True,
        is_scaled_freely=None in factors,
    )
    return replace(found, scale=seen_scale(found, stages.softmax.scores))


def met(stages: Stages) -> tuple[Tensor, Tensor] | None:
    """The two factors of the scores, (batch, heads, tokens, head_dim).

    Args:
        stages: of a run.

    Returns:
        None where no single product of queries and keys was seen.
    """
    event = score_product(stages)
    if event is None or stages.softmax is None or len(stages.softmax.events) > 1:
        return None
    if stages.softmax.fused:
        query, key = event.args[0], event.args[1]
    elif event.operator in ("bmm", "matmul", "baddbmm", "mm"):
        first, second = event.operands[-2:]
        query, key = first, second.mT
    else:
        return None
    batch, tokens = stages.trace.outcome.output.shape[:2]
    if query.shape[-2] != tokens or key.shape[-2] != tokens or query.ndim < 2:
        return None
    return _by_heads(query, batch), _by_heads(key, batch)


def largest_score(material: Material) -> str:
    """Beyond what number no score of normed queries and keys can be, in a sentence.

    Args:
        material: of ``turned``.

    Returns:
        Nothing where the scale was not seen.
    """
    if material.scale is None:
        return ""
    width = material.head_dim
    vectors = [material.tensors[letter].reshape(-1, width) for letter in ("q", "k")]
    longest = [float(each.square().sum(-1).max()) ** 0.5 for each in vectors]
    bound = longest[0] * longest[1] * material.scale
    factor = math.exp(min(2 * bound, 700))
    return (
        f"No score is beyond ±{bound:.3g}: the weights of two keys differ at most by a factor of "
        f"{factor:.3g}."
    )


def _by_heads(tensor: Tensor, batch: int) -> Tensor:
    return tensor.double().reshape(batch, -1, *tensor.shape[-2:])


def _joined(tensor: Tensor) -> Tensor:
    """(batch, heads, tokens, dim) as canonical columns."""
    return tensor.transpose(1, 2).flatten(-2)


def _factor(material: Material, letter: str, met: Tensor) -> float | None:
    """By what one factor all vectors of a projection became longer; None where by several."""
    columns = material.tensors[letter]
    batch, heads, tokens, width = met.shape
    own = columns.shape[-1] // width
    if columns.shape[-1] % width or not own or heads % own:
        return None
    for split in ("columns", "view"):
        if split == "columns":
            parts = columns.reshape(batch, tokens, own, width).transpose(1, 2)
        else:
            parts = columns.reshape(batch, own, tokens, width)
        groups = heads // own
        for spread in (parts.repeat_interleave(groups, 1), parts.repeat(1, groups, 1, 1)):
            ratio = (met.square().sum(-1) / spread.square().sum(-1).clamp(min=1e-12)).sqrt()
            middle = float(ratio.median())
            if bool(((ratio - middle).abs() < 1e-3 * middle).all()):
                return middle
    return None
