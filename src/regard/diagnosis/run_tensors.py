"""From the stages of a run to what guesses are made of: queries, keys and values by letter."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Projection, Stages, heads_of
from regard.diagnosis.pre_score_steps import learned_distances
from regard.diagnosis.reference_attention import Guess, Material, as_laid, seen_scale
from regard.diagnosis.subject import Subject

__all__ = ["are_named", "materials", "outputs_of", "right_guesses", "seen_fills", "weighed"]

_LETTERS = ("q", "k", "v")
_FILLING = ("masked_fill", "masked_fill_", "where", "index_put", "index_put_", "fill_")
_ROLES = {"query": "q", "key": "k", "value": "v"}


def materials(subject: Subject, inputs: Mapping[str, Tensor], stages: Stages) -> list[Material]:
    """What the guesses can be made of, the likeliest reading first."""
    outputs = outputs_of(inputs, stages)
    fills, lowered = seen_fills(stages)
    found: list[Material] = []
    for num_heads in heads_of(subject, stages.softmax):
        for number, read in enumerate(_tensors(inputs, stages, num_heads)):
            tensors = {letter: tensor.double() for letter, tensor in read.items()}
            if not {"q", "k"} <= tensors.keys() or tensors["q"].shape[-1] % num_heads:
                continue
            for place, output in enumerate(outputs):
                material = Material(tensors, num_heads, output, fills, lowered)
                material = replace(material, kv_heads=_value_heads(material))
                scale = None
                if stages.softmax is not None:
                    scale = seen_scale(material, stages.softmax.scores)
                is_likely = number == 0 or scale is not None
                found.append(replace(material, scale=scale, is_likely=is_likely, place=place))
    # Where queries times keys are the scores that were seen, the projections are read well.
    return sorted(found, key=lambda material: material.scale is None)


def _value_heads(material: Material) -> int | None:
    """How many heads the values have, by how wide the output of one is; None: as the keys."""
    if "v" not in material.tensors:
        return None
    heads, rest = divmod(
        material.tensors["v"].shape[-1] * material.num_heads, material.output.shape[-1]
    )
    return None if rest else heads or None


def outputs_of(inputs: Mapping[str, Tensor], stages: Stages) -> list[Tensor]:
    """What may be the output of all heads: as it is, and without the input that was added to it."""
    x = inputs.get("x")
    added = [o - x for o in stages.outputs if x is not None and o.shape == x.shape]
    return [*stages.outputs, *added]


def right_guesses(subject: Subject, stages: Stages, causal: bool | None) -> Iterator[Guess]:
    """Every way to be right: what a projection is called, and where a head's columns lie."""
    scales = (None, *_stated_scales(subject, stages))
    masks = {None: ("none", "causal:same"), True: ("causal:same",), False: ("none",)}[causal]
    renamed = subject.given.kind == "embeddings"
    parts = list(permutations(_LETTERS)) if renamed else [_LETTERS]
    for mask in masks:
        for letters in parts:
            for split in ("columns", "strided"):
                for scale, merge in product(scales, ("columns", "strided")):
                    yield Guess(letters, split, scale=scale, mask=mask, merge=merge)  # pyright: ignore


def _stated_scales(subject: Subject, stages: Stages) -> list[float]:
    """Scales that a configuration states as such: Gemma's number, T5's none at all."""
    holders = [getattr(module, "config", None) for module in subject.given.model.modules()]
    configs = {id(config): config for config in holders if config is not None}
    # T5 has no scale: its weights start small instead.
    named = [name for name, _ in subject.given.model.named_parameters()]
    is_named = any("relative_attention_bias" in name for name in named)
    found = [1.0] if is_named or learned_distances(subject, stages) is not None else []
    for config in configs.values():
        for name, value in cast("dict[str, object]", vars(config)).items():
            if name == "relative_attention_num_buckets":
                found.append(1.0)
            elif re.search("scalar|multiplier", name) and isinstance(value, int | float) and value:
                found += [float(value), float(value) ** -0.5]
    return found


def _tensors(
    inputs: Mapping[str, Tensor], stages: Stages, num_heads: int
) -> Iterator[dict[str, Tensor]]:
    """Query, key and value by letter, for each way to read the projections."""
    if "x" not in inputs:
        yield {_ROLES[role]: tensor for role, tensor in inputs.items()}
        return
    x = inputs["x"]
    if not stages.projections:
        yield {"q": x, "k": x, "v": x, "x": x}
    for projections in _chosen(stages):
        for parts in _read(stages, projections, num_heads):
            widths = [num_heads * part.shape[-1] for part in parts.values()]
            if num_heads > 1 and set(widths) == {stages.outputs[0].shape[-1]}:
                yield {**parts, "q": parts["q"].repeat(1, 1, num_heads), "x": x}  # of each head
            yield {**parts, "x": x}


def _chosen(stages: Stages) -> list[tuple[Projection, ...]]:
    """The projections; of those made of others the first alone, and the last alone."""
    every = stages.projections
    follows = {
        (first.event.place, second.event.place)
        for first, second in permutations(every, 2)
        if stages.trace.reached(first.event.writes).intersection(second.event.reads)
    }
    earlier, later = ({pair[side] for pair in follows} for side in (0, 1))
    firsts = tuple(p for p in every if p.event.place not in later)
    lasts = tuple(p for p in every if p.event.place not in earlier)
    return list(dict.fromkeys(each for each in (every, lasts, firsts) if each))


def _read(
    stages: Stages, projections: tuple[Projection, ...], num_heads: int
) -> Iterator[dict[str, Tensor]]:
    """Query, key and value by letter, of some projections."""
    if len(projections) == 1:
        width = stages.outputs[0].shape[-1] // num_heads
        yield from _fused(projections[0].columns, num_heads, width)
    elif len(projections) == 2:
        yield from _of_two(projections, num_heads)
    elif len(projections) % 3 == 0:
        yield _of_three(projections)


def are_named(stages: Stages) -> bool:
    """Whether the names of the projections tell which is which."""
    return len(stages.projections) >= 2 and all(p.role in _ROLES for p in stages.projections)


def weighed(subject: Subject, material: Material, stages: Stages) -> Iterator[Material]:
    """The same with the weights that were seen, instead of what query and key would give."""
    softmax = stages.softmax
    tokens = subject.layout.tokens
    # Over several axes flattened into one, the weights of a query would not be its own softmax.
    if softmax is None or softmax.axis != -1 or softmax.weights.shape[-1] != tokens:
        return
    shape = torch.Size([subject.layout.batch, material.num_heads, tokens, tokens])
    for weights in list(as_laid(softmax.weights, shape))[:2]:
        yield replace(material, weights=weights)


def _fused(columns: Tensor, num_heads: int, width: int) -> Iterator[dict[str, Tensor]]:
    """One projection for all three: side by side, or head by head."""
    total = columns.shape[-1]
    own = num_heads * width
    rest = (total - own) // 2
    if rest > 0 and own + 2 * rest == total:
        query, key, value = columns.split([own, rest, rest], -1)  # pyright: ignore
        yield {"q": query, "k": key, "v": value}
    if total % (3 * num_heads) == 0:
        for inner in (num_heads, total // 3):
            parts = columns.reshape(*columns.shape[:-1], inner, 3, -1)
            yield {letter: parts[..., i, :].flatten(-2) for i, letter in enumerate(_LETTERS)}


def _of_two(projections: tuple[Projection, ...], num_heads: int) -> Iterator[dict[str, Tensor]]:
    """A query and one projection for both others; or two alone."""
    first, second = (projection.columns for projection in projections)
    names = [_ROLES.get(projection.role, "") for projection in projections]
    if "" not in names and len(set(names)) == 2:
        yield dict(zip(names, (first, second), strict=True))
        if "v" not in names:
            return
    for query, both in ((first, second), (second, first)):
        if both.shape[-1] % 2 == 0:
            key, value = both.chunk(2, -1)
            yield {"q": query, "k": key, "v": value}
        if both.shape[-1] % (2 * num_heads) == 0:
            parts = both.reshape(*both.shape[:-1], num_heads, 2, -1)
            key, value = parts[..., 0, :].flatten(-2), parts[..., 1, :].flatten(-2)
            yield {"q": query, "k": key, "v": value}
    yield {"q": first, "k": first, "v": second}


def _of_three(projections: tuple[Projection, ...]) -> dict[str, Tensor]:
    """Three projections, or three of each head, by their names, or by their order."""
    groups: dict[str, list[Tensor]] = {letter: [] for letter in _LETTERS}
    named = [_ROLES.get(projection.role, "") for projection in projections]
    heads = len(projections) // 3
    if all(named.count(letter) == heads for letter in _LETTERS):
        for letter, projection in zip(named, projections, strict=True):
            groups[letter].append(projection.columns)
    else:
        for place, projection in enumerate(projections):
            groups[_LETTERS[place % 3]].append(projection.columns)
    return {letter: torch.cat(parts, -1) for letter, parts in groups.items()}


def seen_fills(stages: Stages) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The numbers that were put in place of scores, and those that were added to them, by masks.

    Args:
        stages: of a run.
    """
    return tuple(_fills(stages)), tuple(_lowered(stages))


def _fills(stages: Stages) -> Iterator[float]:
    """The numbers that masked_fill, where and what is set by index put in place of scores."""
    for event in stages.trace:
        if event.operator in _FILLING:
            for argument in event.args[1:]:
                number = argument.item() if _is_number(argument) else argument
                if isinstance(number, float | int) and not isinstance(number, bool):
                    yield float(number)


def _lowered(stages: Stages) -> Iterator[float]:
    """The numbers of masks that are added: 0 where a query may attend, and one other."""
    for event in stages.trace:
        adding = event.operator in ("add", "add_") and len(event.operands) == 2
        if adding or "scaled_dot_product" in event.operator:
            for operand in event.operands:
                if operand.ndim >= 2 and operand.numel() < 10_000 and operand.is_floating_point():
                    values = cast("list[float]", operand.unique().tolist())
                    if len(values) == 2 and values[1] == 0 and -60 < values[0] != -1:
                        yield values[0]


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0
