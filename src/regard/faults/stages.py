"""The stages of an attention in the operations that ran: projections, softmax, what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from regard.faults.signature import Role, projection_role
from regard.faults.subject import Subject
from regard.faults.traced import Edit, Event, Trace, traced

__all__ = ["Projection", "Softmax", "Stages", "found_stages", "heads_of", "softmaxes"]

# Where the two factors stand among the arguments.
_PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "matmul": (0, 1),
    "linear": (0, 1),
    "convolution": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
}
_SOFTMAXES = {"_softmax", "_safe_softmax", "softmax"}
_VIEWS = {"view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "t"}


@dataclass(frozen=True, eq=False)
class Projection:
    """What was made of each token by a matrix that depends on none.

    Attributes:
        columns: canonical, (batch, tokens, columns).
        event: the product, or the sum with its bias.
        name: of the parameter; empty where it is none.
        role: what the name says.
        weight: the matrix.
        address: where the matrix lies.
        places: of the columns in what the event gave, flat.
    """

    columns: Tensor
    event: Event
    name: str
    role: Role
    weight: Tensor
    address: int
    places: Tensor


@dataclass(frozen=True, eq=False)
class Softmax:
    """Where scores became weights.

    Attributes:
        scores: what went in, after mask and scale, as it lay there; of calls on one line the
            stack of them.
        weights: what came out.
        axis: over which the softmax ran, counted from the end.
        events: the operations that gave the weights, or the output where one kernel did it all.
        fused: whether one kernel did it all.
    """

    scores: Tensor
    weights: Tensor
    axis: int
    events: tuple[Event, ...]
    fused: bool


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of one run.

    Attributes:
        trace: the run.
        projections: in order; none where the input itself is compared.
        softmax: None where none was seen.
        outputs: of all heads, before a last projection, canonical: one, or several where its
            order of batch and tokens is not known.
        joining: the last projection; None where there is none.
    """

    trace: Trace
    projections: tuple[Projection, ...]
    softmax: Softmax | None
    outputs: tuple[Tensor, ...]
    joining: Event | None


def found_stages(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    extra: Mapping[str, Any] | None = None,
    edits: Mapping[int, Edit] | None = None,
    *,
    projected: bool = True,
) -> Stages:
    """Run a subject once with all its operations, and a few times to see what each token moves.

    Args:
        subject: what runs.
        inputs: as ``Subject.run`` takes them.
        extra: likewise.
        edits: as ``traced`` takes them.
        projected: whether to find the projections, which takes a run for each token.
    """
    trace = traced(subject, inputs, extra=extra, edits=edits)
    softmax = _without_sink(_softmax(trace), subject.layout.tokens)
    behind = _behind(trace, softmax)
    projected = projected and subject.given.kind == "embeddings"
    products = _products(trace, behind) if projected else []
    projections = _projections(subject, inputs, extra, edits, trace, products)
    joining = _joining(trace, behind)
    outputs = (trace.outcome.output,)
    if joining is not None:
        rows, joined = joining.args[_PRODUCTS[joining.operator][0]], joining.output
        if joining.operator == "convolution" and joined is not None:  # the tokens stand last
            rows, joined = rows.mT, joined.mT
        outputs = _canonical_rows(subject, rows, outputs[0], joined)
    return Stages(trace, tuple(projections), softmax, outputs, joining)


def _canonical_rows(
    subject: Subject, rows: Tensor, output: Tensor, joined: Tensor | None
) -> tuple[Tensor, ...]:
    """What went into the last projection; in both orders where what came out does not tell."""
    batch, tokens, columns = output.shape
    if rows.numel() % (batch * tokens) or joined is None:
        return (output,)
    natural = rows.reshape(batch, tokens, -1)
    turned = rows.reshape(tokens, batch, -1).transpose(0, 1)
    if joined.numel() == output.numel():
        if torch.equal(joined.reshape(tokens, batch, columns).transpose(0, 1), output):
            return (turned,)
        if torch.equal(joined.reshape(batch, tokens, columns), output):
            return (natural,)
    return (turned, natural) if subject.layout.order == "tbd" else (natural, turned)


# Softmax


def softmaxes(trace: Trace) -> list[Event]:
    """The operations that gave weights, of whatever kind, in order."""
    return [event for event in trace if _weights_of(event, trace) is not None]


def _softmax(trace: Trace) -> Softmax | None:
    seen = softmaxes(trace)
    if not seen:
        return None
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
    return Softmax(scores, weights, parts[0][2], tuple(alike), "scaled_dot" in first.operator)


def _without_sink(softmax: Softmax | None, tokens: int) -> Softmax | None:
    """The columns of the keys, where one more logit takes part in the sum of each row."""
    if softmax is None or softmax.fused or softmax.weights.shape[-1] != tokens + 1:
        return softmax
    keys = slice(0, tokens)
    return replace(softmax, scores=softmax.scores[..., keys], weights=softmax.weights[..., keys])


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
    if event.operator in ("div", "div_", "true_divide") and len(event.operands) == 2:
        return _by_hand(event, trace)
    return None


def _by_hand(event: Event, trace: Trace) -> tuple[Tensor, Tensor, int] | None:
    """A softmax in several lines: exp, sum, and this division."""
    top, bottom = event.operands
    if event.output is None or top.ndim != bottom.ndim or top.shape == bottom.shape:
        return None
    for axis in range(-1, -top.ndim - 1, -1):
        total = top.sum(axis, keepdim=True)
        if total.shape == bottom.shape and _equal(total, bottom):
            before = [e for e in trace if e.place < event.place and e.operator in ("exp", "exp_")]
            alike = [e for e in before if e.output is not None and _equal(e.output, top)]
            source = alike[0] if alike else None
            if source is not None:
                return _before_maximum(source, trace), event.output, axis
    return None


def _before_maximum(exponential: Event, trace: Trace) -> Tensor:
    """The scores, before the largest of each row was taken off."""
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
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, -torch.inf)
    masks = [a for a in event.args[3:] if isinstance(a, Tensor)]
    mask = event.kwargs.get("attn_mask", masks[0] if masks else None)
    if mask is not None:
        added = torch.zeros_like(scores)
        scores = scores + (
            added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        )
    return scores.float()


# Projections


def _behind(trace: Trace, softmax: Softmax | None) -> set[int]:
    """The places of the operations that depend on the weights.

    Not their addresses: what is added to the input in place lies where the input lay.
    """
    if softmax is None:
        return set()
    reached = {address for event in softmax.events for address in event.writes}
    found: set[int] = set()
    for event in trace:
        if event.place > softmax.events[0].place and reached.intersection(event.reads):
            reached.update(event.writes)
            found.add(event.place)
    return found


def _products(trace: Trace, behind: set[int]) -> list[Event]:
    """Products of something that depends on the input with something that does not."""
    moved = trace.reached(trace.entries)
    found: list[Event] = []
    for event in trace:
        factors = _factor_addresses(event, trace)
        if factors is None or event.output is None:
            continue
        data, weight = factors
        if data in moved and event.place not in behind and weight not in moved:
            found.append(event)
    return found


def _joining(trace: Trace, behind: set[int]) -> Event | None:
    """The first product, behind the softmax, with something that does not depend on the input."""
    moved = trace.reached(trace.entries)
    for event in trace:
        factors = _factor_addresses(event, trace)
        if factors is not None and event.place in behind and factors[1] not in moved:
            return event
    return None


def _factor_addresses(event: Event, trace: Trace) -> tuple[int, int] | None:
    """Where the two factors of a product lie: the one that changes, and the matrix."""
    places = _PRODUCTS.get(event.operator)
    if places is None or not all(isinstance(event.args[place], Tensor) for place in places):
        return None
    tensors = [place for place, a in enumerate(event.args) if isinstance(a, Tensor)]
    first, second = (event.reads[tensors.index(place)] for place in places)
    moved = trace.moved
    if second in moved and first not in moved:
        return second, first
    return first, second


def _projections(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    extra: Mapping[str, Any] | None,
    edits: Mapping[int, Edit] | None,
    trace: Trace,
    products: list[Event],
) -> list[Projection]:
    """The products, each in canonical form."""
    if not products:
        return []
    ends = [_with_bias(event, trace) for event in products]
    places = _token_places(subject, inputs, extra, edits, trace, ends)
    names = _parameter_names(subject.given.model)
    found: list[Projection] = []
    for product, end in zip(products, ends, strict=True):
        where = places[end.place]
        if where is None or end.output is None:
            continue
        factors = _factor_addresses(product, trace)
        assert factors is not None
        name = names.get(factors[1], "")
        columns = end.output.flatten()[where]
        weight = next(
            product.args[p]
            for p in _PRODUCTS[product.operator]
            if product.args[p].untyped_storage().nbytes() and _lies(product, p) == factors[1]
        )
        role = projection_role(name)
        found.append(Projection(columns, end, name, role, weight, factors[1], where))
    return found


def _lies(event: Event, place: int) -> int:
    tensors = [p for p, a in enumerate(event.args) if isinstance(a, Tensor)]
    return event.reads[tensors.index(place)]


def _with_bias(event: Event, trace: Trace) -> Event:
    """The sum with a bias that follows a product at once, or the product itself."""
    for later in trace:
        if later.place <= event.place or not set(event.writes).intersection(later.reads):
            continue
        if set(later.writes) == set(event.writes) and later.operator in _VIEWS:
            continue
        operands = later.operands
        added = later.operator in ("add", "add_") and len(operands) == 2
        if added and operands[1].ndim == 1 and later.reads[1] not in trace.moved:
            return later
        return event
    return event


def _token_places(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    extra: Mapping[str, Any] | None,
    edits: Mapping[int, Edit] | None,
    trace: Trace,
    events: list[Event],
) -> dict[int, Tensor | None]:
    """For each operation where in its output each token's columns lie, (batch, tokens, columns)."""
    x = inputs["x"]
    batch, tokens = x.shape[:2]
    wanted = {event.place for event in events}
    base = {e.place: e.output for e in trace if e.place in wanted}
    found: dict[int, list[Tensor]] = {place: [] for place in wanted}
    for sample in range(batch):
        for token in range(tokens):
            other = x.clone()
            other[sample, token] += torch.linspace(0.5, 1.5, x.shape[-1])
            run = traced(subject, {**inputs, "x": other}, extra=extra, edits=edits, wanted=wanted)
            for place in wanted:
                now, before = run.events[place].output, base[place]
                if now is None or before is None:
                    continue
                moved = (now != before) & ~(now.isnan() & before.isnan())
                found[place].append(moved.flatten().nonzero().flatten())
    places: dict[int, Tensor | None] = {}
    for place, parts in found.items():
        widths = {len(part) for part in parts}
        whole = len(widths) == 1 and 0 not in widths
        places[place] = torch.stack(parts).reshape(batch, tokens, -1) if whole else None
    return places


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter by where it lies."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {tensor.untyped_storage().data_ptr(): name for name, tensor in named}


def heads_of(subject: Subject, softmax: Softmax | None) -> list[int]:
    """How many heads there may be, the likeliest first."""
    layout = subject.layout
    found: list[int] = []
    if softmax is not None:
        square = layout.batch * layout.tokens**2
        count, rest = divmod(prod(softmax.weights.shape), square)
        found += [count] if count and not rest else []
        shape = softmax.weights.shape
        if not found and len(shape) >= 2 and shape[-1] == shape[-2]:
            found.append(shape[-1])  # of attention between the heads of a token
    for holder in (subject.given.model, getattr(subject.given.model, "config", None)):
        for name in ("num_heads", "n_heads", "n_head", "heads", "h", "nh", "num_attention_heads"):
            value = getattr(holder, name, None)
            found += [value] if isinstance(value, int) and value else []
    found += [v for n, v in subject.given.options.items() if "h" in n and isinstance(v, int)]
    return list(dict.fromkeys(found)) or [layout.num_heads]
