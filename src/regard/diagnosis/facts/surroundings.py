"""Facts about an attention beside its formula: its projections, its heads and its output."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.facts.merged_heads import HeadOutputs
from regard.diagnosis.facts.origins import Sizes
from regard.diagnosis.facts.rows import Rows
from regard.diagnosis.facts.trace import Trace
from regard.diagnosis.facts.written import Written

ROLES = ("query", "key", "value")

Pair = tuple[str, str]
"""Two of "query", "key" and "value"."""


@dataclass(frozen=True, eq=False)
class Surroundings:
    """Facts about an attention beside its formula.

    Attributes:
        is_module: queries are projected, not given.
        input_dim: of the tokens that queries are projected from; 0 if that is unknown.
        crosses: queries and keys are projected from different tensors.
        value_heads: the index of the value head of each head.
        same_tensors: pairs of query, key and value that are equal, as one layer projects them.
        exchanged: the argument that is used as query, key or value in place of its own, by role.
        has_equal_heads: all heads have the same query, key and weights.
        projects_pieces: one matrix projects each of several pieces of a token.
        value_is_input: the value is the input itself, while the query is projected.
        is_merged: the heads of a token lie side by side; None if that is unknown.
        keeps_order: row t of the result follows from row t of the output; None if unknown.
        returns_other_weights: the result has weights that did not meet the values.
        learned_queries: the number of queries that follow from parameters; 0 for those of tokens.
    """

    is_module: bool = True
    input_dim: int = 0
    crosses: bool = False
    value_heads: tuple[int, ...] = ()
    same_tensors: frozenset[Pair] = frozenset()
    exchanged: Mapping[str, str] = field(default_factory=dict[str, str])
    has_equal_heads: bool = False
    projects_pieces: bool = False
    value_is_input: bool = False
    is_merged: bool | None = None
    keeps_order: bool | None = None
    returns_other_weights: bool = False
    learned_queries: int = 0


def surroundings_of(
    rows: Rows, trace: Trace | None, sizes: Sizes, inputs: Collection[str], *, is_alone: bool
) -> tuple[Surroundings, str]:
    """Return the surroundings of an attention, and the line that merges its heads.

    Args:
        rows: the attention.
        trace: its run; None if it was read from outputs.
        sizes: of the run.
        inputs: the roles of the inputs, such as "x", or "query", "key" and "value".
        is_alone: the run has no other attention.
    """
    parts = (rows.query, rows.key, rows.weights)
    query, _, value = (path.source for path in rows.paths)
    is_merged, line, keeps_order, returns = None, "", None, False
    if trace is not None:
        outputs = HeadOutputs(rows, trace, sizes)
        is_merged, line = outputs.are_merged()
        keeps_order = outputs.keep_order() if is_alone else None
        returns = is_alone and outputs.return_other_weights()
    exchanged = {
        role: argument
        for role, argument in zip(ROLES, rows.inputs, strict=True)
        if argument and argument != role and {*ROLES} <= {*inputs}
    }
    surroundings = Surroundings(
        is_module=not isinstance(query, str),
        input_dim=0 if trace is None else _input_dim(query, trace),
        crosses=rows.crosses,
        value_heads=rows.value_map or rows.head_map,
        same_tensors=frozenset(_equal_pairs(rows)),
        exchanged=exchanged,
        has_equal_heads=rows.query.shape[1] > 1
        and all(torch.equal(part[:, :1].expand_as(part), part) for part in parts),
        projects_pieces=trace is not None and _projects_pieces(rows, trace, sizes),
        value_is_input=isinstance(value, str) and not isinstance(query, str),
        is_merged=is_merged,
        keeps_order=keeps_order,
        returns_other_weights=returns,
        learned_queries=rows.query.shape[-2] if rows.paths[0].is_learned else 0,
    )
    return surroundings, line


def _input_dim(source: int | str, trace: Trace) -> int:
    """Return the width of the tensor that the step of a projection reads; 0 for no projection."""
    inputs = () if isinstance(source, str) else trace.steps[source].inputs
    return next((tensor.shape[-1] for tensor in inputs if tensor.ndim > 1), 0)


def lines_of(rows: Rows, trace: Trace) -> dict[str, str]:
    """Return the ``file:line`` of each stage of an attention, and of its projections.

    They are those of ``Written.stages``, "query layer", "key layer" and "value layer", and "keys"
    and "values" for the steps that repeat those of grouped heads.
    """
    attention = rows.attentions[0]
    written = Written(trace, attention)
    lines = {**rows.lines, **written.stages()}
    for role, path in zip(ROLES, rows.paths, strict=True):
        if isinstance(path.source, int):
            lines[f"{role} layer"] = written.of_projection(role)
    for name, tensor in (("keys", attention.key), ("values", attention.value)):
        if tensor is not None:
            steps = (step for step in trace.steps[: attention.at] if step.depends)
            numbers = tensor.flatten()
            lines[name] = next((s.line for s in steps if _hold(s.outputs, numbers)), "")
    return lines


def _equal_pairs(rows: Rows) -> set[Pair]:
    """Return the pairs of projected query, key and value that are equal."""
    tensors = dict(zip(ROLES, (rows.query, rows.key, rows.value), strict=True))
    sources = dict(zip(ROLES, (path.source for path in rows.paths), strict=True))
    return {
        (first, second)
        for first, second in combinations(ROLES, 2)
        if isinstance(sources[first], int)  # one input may be query, key and value
        and tensors[first].shape == tensors[second].shape
        and torch.equal(tensors[first], tensors[second])
    }


def _projects_pieces(rows: Rows, trace: Trace, sizes: Sizes) -> bool:
    """Return True if one matrix projects each of several pieces of a token."""
    source = rows.paths[0].source
    tokens = (sizes.batch or 1) * sizes.tokens
    if isinstance(source, str):
        return False
    size = trace.steps[source].outputs[0].numel()
    products = (  # a bias may be added to one
        step
        for step in reversed(trace.steps[: source + 1])
        if step.name in _PRODUCTS and step.outputs[0].numel() == size
    )
    product = next(products, None)
    if product is None:
        return False
    factor, matrix = product.inputs[-2:]
    if matrix.ndim == 3 and not torch.equal(matrix, matrix[:1].expand_as(matrix)):
        return False
    pieces = factor.reshape(-1, factor.shape[-1])
    is_longer = len(pieces) > tokens and len(pieces) % tokens == 0
    return is_longer and len(cast(Tensor, pieces[:, 0].unique())) > tokens


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def _hold(outputs: Iterable[Tensor], keys: Tensor) -> bool:
    """Return True if a tensor holds the numbers of repeated keys, as often as they do."""
    repeats = int((keys == keys[0]).sum())
    return repeats > 1 and any(
        output.is_floating_point()
        and output.numel() >= keys.numel()
        and int((output == keys[0]).sum()) >= repeats
        and bool(torch.isin(keys, output.double()).all())
        for output in outputs
    )
