"""Where scores became weights: in one operation, in a kernel, or by hand with exp and a sum."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from regard.diagnosis.traced_run import Event, Trace

__all__ = ["Softmax", "exponentials", "softmax_of", "softmaxes"]

_SOFTMAXES = {"_softmax", "_safe_softmax", "softmax"}
_DIVISIONS = {"div", "div_", "true_divide"}
_EXPONENTIALS = {"exp", "exp_"}
_PRODUCTS = {"mm", "bmm", "matmul", "baddbmm", "mul"}
_MASKING = {"mul", "mul_", "tril", "triu", "masked_fill", "masked_fill_", "where", "clone"}


@dataclass(frozen=True, eq=False)
class Softmax:
    """Where scores became weights.

    Attributes:
        scores: what went in, after mask and scale, as it lay there; of calls on one line the
            stack of them.
        weights: what came out.
        axis: over which the softmax ran, counted from the end.
        events: the operations that gave the weights, or the output where one kernel did it all;
            the exp where the values were summed first and divided last.
        fused: whether one kernel did it all.
        total: the sum by which the output was divided last; None where weights came first.
    """

    scores: Tensor
    weights: Tensor
    axis: int
    events: tuple[Event, ...]
    fused: bool = False
    total: Event | None = None


def softmaxes(trace: Trace) -> list[Event]:
    """The operations that gave weights, of whatever kind, in order."""
    seen = [event for event in trace if _weights_of(event, trace) is not None]
    if not seen and (last := _divided_last(trace)) is not None:
        return list(last.events)
    return seen


def softmax_of(trace: Trace, tokens: int) -> Softmax | None:
    """The first softmax of a run, with those beside it on the same line.

    Args:
        trace: of the run.
        tokens: how many keys there are: one more column is a sink.
    """
    seen = [event for event in trace if _weights_of(event, trace) is not None]
    if not seen:
        return _divided_last(trace)
    first = seen[0]
    later = trace.reached(first.writes)  # a second layer is another attention
    alike = [
        event
        for event in seen
        if (event is first or not later.intersection(event.reads))
        and event.operator == first.operator
        and _line(event) == _line(first)
        and event.output is not None
        and first.output is not None
        and event.output.shape == first.output.shape
    ]
    parts = [found for event in alike if (found := _weights_of(event, trace)) is not None]
    scores = torch.stack([part[0] for part in parts])
    weights = torch.stack([part[1] for part in parts])
    if len(parts) == 1:
        scores, weights = scores[0], weights[0]
    fused = "scaled_dot" in first.operator
    return _without_sink(Softmax(scores, weights, parts[0][2], tuple(alike), fused), tokens)


def _without_sink(softmax: Softmax, tokens: int) -> Softmax:
    """The columns of the keys, where one more logit takes part in the sum of each row."""
    if softmax.fused or softmax.weights.shape[-1] != tokens + 1:
        return softmax
    keys = slice(0, tokens)
    return replace(softmax, scores=softmax.scores[..., keys], weights=softmax.weights[..., keys])


def exponentials(trace: Trace) -> tuple[Event, ...]:
    """The operations that took exp of something that the inputs move."""
    moved = trace.moved
    found = (e for e in trace if e.operator in _EXPONENTIALS and moved.intersection(e.reads))
    return tuple(found)


def _line(event: Event) -> tuple[str, int]:
    return (event.caller.file, event.caller.line) if event.caller else ("", 0)


def _weights_of(event: Event, trace: Trace) -> tuple[Tensor, Tensor, int] | None:
    """Scores, weights and axis where an operation is a softmax, of whatever kind."""
    if event.output is None:
        return None
    if event.operator in _SOFTMAXES and event.output.ndim:
        axis = int(event.args[1])
        axis = axis if axis < 0 else axis - event.output.ndim
        return event.args[0], event.output, axis
    if "scaled_dot_product" in event.operator:
        scores = _fused_scores(event)
        return scores, scores.softmax(-1), -1
    if event.operator in _DIVISIONS and len(event.operands) == 2:
        return _by_hand(event, trace)
    if event.operator in _EXPONENTIALS and event.output.ndim > 1:
        return _of_logarithms(event, trace)
    return None


def _by_hand(event: Event, trace: Trace) -> tuple[Tensor, Tensor, int] | None:
    """A softmax in several lines: exp, sum, and this division; 1 + sum has a sink of score 0."""
    top, bottom = event.operands
    if event.output is None or top.ndim != bottom.ndim:
        return None
    for axis in range(-1, -top.ndim - 1, -1):
        total = top.sum(axis, keepdim=True)
        if bottom.shape == top.shape:
            total = total.expand_as(top)
        is_sum, has_sink = _equal(total, bottom), _equal(total + 1, bottom)
        found = _scores_behind(top, trace, event.place) if is_sum or has_sink else None
        # With the largest taken off, 1 is no score of 0.
        if found is not None and (is_sum or bool((found[0] == found[1].args[0]).all())):
            return found[0], event.output, axis
    return None


def _of_logarithms(event: Event, trace: Trace) -> tuple[Tensor, Tensor, int] | None:
    """The exp of scores from which the logarithm of their sum was taken off."""
    weights = event.output
    assert weights is not None
    for axis in range(-1, -weights.ndim - 1, -1):
        total = weights.sum(axis)
        if weights.shape[axis] > 1 and _equal(total, torch.ones_like(total)):
            return _before_maximum(event, trace), weights, axis
    return None


def _divided_last(trace: Trace) -> Softmax | None:
    """exp times values, divided by the sum of exp: the weights are never there as such."""
    summed = list(_multiplied(trace))
    divisions = [e for e in trace if e.operator in _DIVISIONS and len(e.operands) == 2]
    for division, event in product(divisions, summed):
        if event.output is None or event.place > division.place:
            continue
        for axis in range(-1, -event.output.ndim - 1, -1):
            total = event.output.sum(axis)
            if event.output.shape[axis] == 1 or not _holds(division.operands[1], total):
                continue
            found = _scores_behind(event.output, trace, division.place)
            if found is not None:
                scores, source = found
                weights = event.output / total.unsqueeze(axis)
                line = _summing(trace, total, division)
                return Softmax(scores, weights, axis, (source,), total=line)
    return None


def _multiplied(trace: Trace) -> Iterator[Event]:
    """What holds the exp of scores, masked or not, and enters a product."""
    reached = {a for e in trace if e.operator in _EXPONENTIALS for a in e.writes}
    for event in trace:
        if event.operator in _MASKING and reached.intersection(event.reads):
            reached.update(event.writes)
        elif event.operator not in _EXPONENTIALS:
            continue
        written = set(event.writes)
        later = (e for e in trace if e.place > event.place and e.operator in _PRODUCTS)
        if any(written.intersection(e.reads) for e in later):
            yield event


def _summing(trace: Trace, total: Tensor, division: Event) -> Event:
    """The operation that gave a sum; the division where none did."""
    before = [e for e in trace if e.output is not None and e.place < division.place]
    return next((e for e in before if e.output is not None and _holds(e.output, total)), division)


def _holds(tensor: Tensor, total: Tensor) -> bool:
    """Whether a tensor is a sum, laid in whatever shape, expanded or not."""
    for axis in range(tensor.ndim):
        if tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    if tensor.numel() != total.numel():
        return False
    return _equal(tensor.reshape(total.shape), total)


def _scores_behind(top: Tensor, trace: Trace, place: int) -> tuple[Tensor, Event] | None:
    """The scores whose exp a tensor is, 0 where it was masked, and the exp; None without one."""
    for event in trace:
        if event.place >= place or event.operator not in _EXPONENTIALS:
            continue
        whole = event.output
        if whole is None or whole.numel() != top.numel() or not bool(top.any()):
            continue
        whole, scores = whole.reshape(top.shape), _before_maximum(event, trace).reshape(top.shape)
        masked = top == 0
        if _equal(whole.masked_fill(masked, 0), top):
            return scores.masked_fill(masked & (whole != 0), -torch.inf), event
    return None


def _before_maximum(exponential: Event, trace: Trace) -> Tensor:
    """The scores, before the largest of each row, or the logarithm of its sum, was taken off."""
    shifted = exponential.args[0]
    for event in trace:
        if event.place < exponential.place and event.operator == "sub" and event.output is not None:
            left, right = event.args[:2]
            single = isinstance(right, Tensor) and right.numel() < left.numel()
            if single and event.output.shape == shifted.shape and _equal(event.output, shifted):
                return left
    return shifted


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def _fused_scores(event: Event) -> Tensor:
    """What scaled_dot_product_attention makes of its arguments before its softmax."""
    query, key = event.args[0].double(), event.args[1].double()
    if query.shape[-3] != key.shape[-3] and query.ndim == key.ndim:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = event.kwargs.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    flags = [argument for argument in event.args[3:] if isinstance(argument, bool)]
    causal = event.kwargs.get("is_causal", bool(flags and flags[0]))
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril()
        scores = scores.masked_fill(~keep, -torch.inf)
    masks = [a for a in event.args[3:] if isinstance(a, Tensor)]
    mask = event.kwargs.get("attn_mask", masks[0] if masks else None)
    if mask is not None:
        added = torch.zeros_like(scores)
        scores = scores + (
            added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        )
    return scores.float()
