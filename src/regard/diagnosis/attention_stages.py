"""The stages of an attention in the operations that ran: projections, softmax, what comes of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.signature import Role, projection_role
from regard.diagnosis.softmax_detection import Softmax, exponentials, softmax_of
from regard.diagnosis.subject import Subject
from regard.diagnosis.traced_run import Edit, Event, Trace, traced

__all__ = ["Projection", "Stages", "found_stages", "heads_of"]

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
    softmax = softmax_of(trace, subject.layout.tokens)
    behind = _behind(trace, softmax)
    projected = projected and subject.given.kind == "embeddings"
    products = _products(trace, behind) if projected else []
    projections = _projections(subject, inputs, extra, edits, trace, products)
    joinings = _joinings(trace, behind)
    outputs = (trace.outcome.output,)
    if joinings:
        added = _of_heads_apart(joinings, outputs[0])
        outputs = _canonical_rows(subject, joinings[0], outputs[0]) if added is None else (added,)
        outputs = tuple(o for output in outputs for o in _by_head(trace, joinings[0], output))
    joining = joinings[0] if joinings else None
    return Stages(trace, tuple(projections), softmax, outputs, joining)


def _sides(joining: Event) -> tuple[Tensor, Tensor | None]:
    """What went into a last projection, and what came out, the columns last in both."""
    rows, joined = joining.args[_PRODUCTS[joining.operator][0]], joining.output
    if joining.operator == "convolution" and joined is not None:  # the tokens stand last
        return rows.mT, joined.mT
    return rows, joined


def _of_heads_apart(joinings: list[Event], output: Tensor) -> Tensor | None:
    """What went into the last projections where each head has its own, and their sum is told.

    One product for each head, or one that holds them all; None where the output, but for a bias,
    is no such sum.
    """
    batch, tokens, columns = output.shape
    parts: list[tuple[Tensor, Tensor]] = []
    for event in joinings:
        rows, joined = _sides(event)
        if joined is None or joined.shape[-1] != columns or rows.numel() % (batch * tokens):
            return None
        # (heads, batch · tokens, columns), or (batch · heads, tokens, columns)
        inner = tokens if rows.ndim == 3 and rows.shape[1] == tokens else batch * tokens
        shape = (batch, -1, tokens) if inner == tokens else (-1, batch, tokens)
        if joined.numel() // columns != rows.numel() // rows.shape[-1]:
            return None
        sides = [side.reshape(*shape, side.shape[-1]) for side in (rows, joined)]
        turned = [side if inner == tokens else side.transpose(0, 1) for side in sides]
        parts.append((turned[0].transpose(1, 2).flatten(2), turned[1].sum(1)))
    missing = output - torch.stack([joined for _, joined in parts]).sum(0)
    bias = missing[:1, :1].expand_as(missing)
    if not torch.allclose(missing, bias, rtol=1e-4, atol=1e-5, equal_nan=True):
        return None
    return torch.cat([rows for rows, _ in parts], -1)


def _by_head(trace: Trace, joining: Event, output: Tensor) -> Iterator[Tensor]:
    """What went into the last projection, its columns head by head; then as they lay.

    einsum may lay the numbers of all heads in turn: the matrix behind them has them so as well.
    """
    batch, tokens, columns = output.shape
    for event in trace:
        mixed = event.output
        apart = mixed is not None and mixed.numel() == output.numel() and mixed.ndim >= 3
        if mixed is None or not apart or event.place > joining.place:
            continue
        width = mixed.shape[-1]
        if event.operator not in _PRODUCTS or width == columns or columns % width:
            continue
        heads = mixed.reshape(batch, -1, tokens, width)
        laid = heads.permute(0, 2, 3, 1).flatten(2)
        if torch.equal(laid.nan_to_num(), output.nan_to_num()):
            yield heads.transpose(1, 2).flatten(2)
            break
    yield output


def _canonical_rows(subject: Subject, joining: Event, output: Tensor) -> tuple[Tensor, ...]:
    """What went into the last projection; in both orders where what came out does not tell."""
    rows, joined = _sides(joining)
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


# Projections


def _behind(trace: Trace, softmax: Softmax | None) -> set[int]:
    """The places of the operations that depend on the weights, or on exp where none were seen.

    Not their addresses: what is added to the input in place lies where the input lay.
    """
    sources = softmax.events if softmax is not None else exponentials(trace)
    if not sources:
        return set()
    reached = {address for event in sources for address in event.writes}
    found: set[int] = set()
    for event in trace:
        if event.place > sources[0].place and reached.intersection(event.reads):
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


def _joinings(trace: Trace, behind: set[int]) -> list[Event]:
    """The products, behind the softmax, with something that does not depend on the input.

    The first one, and those beside it that nothing of it leads to.
    """
    moved = trace.moved
    found: list[Event] = []
    later: set[int] = set()
    for event in trace:
        factors = _factor_addresses(event, trace)
        if factors is None or event.place not in behind or factors[1] in moved:
            continue
        if not later.intersection(event.reads):
            found.append(event)
            later |= trace.reached(event.writes)
    return found


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
            other[sample, token] += torch.linspace(0.5, 1.5, x.shape[-1], device="cpu")
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
