"""Where the outputs of the heads go: whether the parts of one token come to lie side by side."""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from regard.diagnosis.facts.origins import Coordinates, Sizes, located
from regard.diagnosis.facts.rows import Rows
from regard.diagnosis.facts.trace import Step, Trace

__all__ = ["keeps_order", "merged", "returns_others"]

_CLOSE = 1e-9


def merged(rows: Rows, trace: Trace, sizes: Sizes) -> tuple[bool | None, str]:
    """Return whether heads are merged token by token, and the line that reads the merged heads.

    None: what is done with them could not be read, as where each head has a layer of its own.
    """
    output = rows.weights @ rows.value
    place = torch.arange(output.numel()).reshape(output.shape)
    values, order = output.flatten().sort()
    if not bool(values.isfinite().all()):
        return None, ""
    size = max(float(values.abs().max()), 1e-300)
    heads, tokens, width = output.shape[1:]
    for tensor, line in _readers(trace, rows):
        if tensor.numel() != output.numel():
            continue
        wanted = tensor.detach().double().flatten()
        at = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
        before = (at - 1).clamp(min=0)
        nearer = (values[before] - wanted).abs() < (values[at] - wanted).abs()
        at = torch.where(nearer, before, at)
        if not bool(((values[at] - wanted).abs() <= _CLOSE * size).all()):
            continue
        index = place.flatten()[order[at]].reshape(tensor.shape)
        sample, token = index // (heads * tokens * width), index // width % tokens
        for own in _places(tensor.shape, sizes):
            apart = (own.sample != sample) | (own.token != token)
            # Equal numbers of several tokens, as of rows without a key, belong to each of them.
            there = output[own.sample[apart], :, own.token[apart]].flatten(1)
            gap = (there - tensor.detach().double()[apart][:, None]).abs()
            if not len(gap) or bool((gap.amin(-1) <= _CLOSE * size).all()):
                return True, line
        if next(_places(tensor.shape, sizes), None) is not None:
            return False, line
    return None, ""


def keeps_order(rows: Rows, trace: Trace, sizes: Sizes) -> bool | None:
    """Return whether row t of the result follows from row t of the attention's output alone.

    False: it follows from another row; None: from several, or that is unknown.
    """
    live = [attention.live for attention in rows.attentions]
    results = [t for t in _floats(tree_leaves(trace.result)) if t.requires_grad]
    if not results or not all(own.requires_grad for own in live):
        return None
    result = results[0]
    tokens = _tokens_of(rows, live)
    place = next(_places(result.shape, sizes), None)
    if tokens is None or place is None:
        return None
    last = rows.weights.shape[-2] - 1
    for token in sorted({0, last // 3, max(last - 1, 0), last}):
        numbers = result[(place.token == token) & (place.sample == 0)]
        if not len(numbers):
            return None
        factors = torch.linspace(1.0, 2.0, len(numbers), dtype=numbers.dtype)
        grads = torch.autograd.grad(
            (numbers * factors).sum(), live, retain_graph=True, allow_unused=True
        )
        met: set[int] = set()
        for grad, own in zip(grads, tokens, strict=True):
            reached = cast(Tensor | None, grad)  # None: it is no part of the graph
            if reached is not None:
                met |= {*cast(list[int], own[reached.detach() != 0].tolist())}
        if met != {token}:
            return False if len(met) == 1 else None
    return True


def _tokens_of(rows: Rows, outputs: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the token of each number of outputs of attention."""
    output = rows.weights @ rows.value
    tokens = torch.arange(output.shape[-2])[:, None].expand(output.shape).flatten()
    values, order = output.flatten().sort()
    if not bool(values.isfinite().all()):
        return None
    found: list[Tensor] = []
    for own in outputs:
        wanted = own.detach().double()
        at = torch.searchsorted(values, wanted.flatten()).clamp(max=len(values) - 1)
        before = (at - 1).clamp(min=0)
        nearer = (values[before] - wanted.flatten()).abs() < (values[at] - wanted.flatten()).abs()
        at = torch.where(nearer, before, at)
        gap = (values[at] - wanted.flatten()).abs()
        if not bool((gap <= _CLOSE * max(float(values.abs().max()), 1e-300)).all()):
            return None
        found.append(tokens[order[at]].reshape(own.shape))
    return found


def returns_others(rows: Rows, trace: Trace) -> bool:
    """Return True if weights are given back that are not those that met the values."""
    weights = rows.weights
    tokens = tuple(weights.shape[-2:])
    known = (weights, weights.mean(1), weights.mean(1, keepdim=True))
    for tensor in _floats(tree_leaves(trace.result)):
        own = tensor.detach().double()
        if tuple(own.shape[-2:]) != tokens or tokens[0] != tokens[1] or bool((own < 0).any()):
            continue
        alike = [each for each in known if each.numel() == own.numel()]
        if not alike or any(torch.allclose(own.reshape(e.shape), e, atol=_CLOSE) for e in alike):
            continue
        ones = torch.ones((), dtype=torch.float64)
        if any(bool(((own.sum(axis) - ones).abs() < _CLOSE).all()) for axis in (-1, -2)):
            return True
    return False


def _readers(trace: Trace, rows: Rows) -> Iterator[tuple[Tensor, str]]:
    """Yield the tensors that may be merged heads: what layers project, and what is given back."""
    first = min(attention.at for attention in rows.attentions)
    for step in trace.steps[first:]:
        if step.projects:
            for tensor in _floats(step.inputs):
                yield tensor, _line_of(tensor, trace.steps[first:], step)
    for tensor in _floats(tree_leaves(trace.result)):
        yield tensor, ""


def _line_of(tensor: Tensor, steps: list[Step] | tuple[Step, ...], reader: Step) -> str:
    """Return the line of the last step on another line that gave a tensor of these numbers."""
    made = [
        step.line
        for step in steps
        for own in step.outputs
        if own.numel() == tensor.numel() and step.line != reader.line
    ]
    return made[-1] if made else reader.line


def _floats(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and not value.is_nested:
            yield value


def _places(shape: torch.Size, sizes: Sizes) -> Iterator[Coordinates]:
    """Yield the coordinates of a tensor; one axis of samples and tokens has either first."""
    for is_turned in (False, True):
        own = located(shape, Sizes(sizes.batch, sizes.tokens, is_turned))
        if own is not None:
            yield own
