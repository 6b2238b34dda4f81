"""How scores became weights and weights met values in a notebook's cells, from what really ran.

Nothing is run again: the numbers are those of the cells. Where each tensor came from is read from
the operations, never from its name.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.diagnosis.softmax_detection import Softmax
from regard.diagnosis.traced_run import Event

__all__ = [
    "PRODUCTS",
    "SAME",
    "Chain",
    "Mixing",
    "Product",
    "between",
    "chains_of",
    "maker",
    "near",
    "origin",
]

PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "matmul": (0, 1)}
"""Where the two factors stand among the arguments."""

_SCALING = {"mul", "mul_", "div", "div_", "true_divide"}
SAME = {
    *("t", "view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze"),
    *("squeeze_", "unsqueeze_", "lift_fresh"),
    *("expand", "clone", "contiguous", "alias", "_to_copy", "to", "detach", "unflatten", "numpy_T"),
    *("_reshape_alias", "unsafe_chunk", "split", "slice", "select", "unbind", "split_with_sizes"),
}
"""Operations that leave the numbers as they are."""

_MASKING = {
    *("masked_fill", "masked_fill_", "where", "index_put", "index_put_", "fill_", "tril", "triu"),
    *("tril_", "triu_", "add", "add_", "sub", "sub_", "copy_"),
}
_BY_HAND = {"exp", "exp_"}
_MADE = {*PRODUCTS, "addmm", "linear"}
_BETWEEN = _SCALING | SAME | _MASKING | _BY_HAND


@dataclass(frozen=True, eq=False)
class Product:
    """Rows times columns: what scores were made of.

    Attributes:
        event: the operation; a kernel that does it all where one did.
        left: (batch, rows, width).
        right: (batch, columns, width).
        scale: what the product was multiplied with to become the scores.
        folded: the same with what the two were multiplied with before they met.
        is_turned: whether these are surely two of tokens: one of them was transposed to be
            multiplied, there is a batch, or both were made by a product.
    """

    event: Event
    left: Tensor
    right: Tensor
    scale: float
    folded: float
    is_turned: bool

    @property
    def raw(self) -> Tensor:
        """Left times right, (batch, rows, columns)."""
        return self.left.double() @ self.right.double().mT


@dataclass(frozen=True, eq=False)
class Mixing:
    """Weights times values.

    Attributes:
        event: the operation.
        weights: (batch, rows, columns) as they were then, laid as the scores.
        over_rows: whether the sum runs over the rows of the scores and not over their columns.
        value: (batch, as many as the sum runs over, width).
        output: (batch, tokens, width).
        is_value_turned: whether the values stood first and as they lie: rows may be columns.
        address: where the values lie.
    """

    event: Event
    weights: Tensor
    over_rows: bool
    value: Tensor
    output: Tensor
    is_value_turned: bool
    address: int


@dataclass(frozen=True, eq=False)
class Chain:
    """One softmax of the cells, with what stands before and behind it.

    Attributes:
        softmax: as it was seen.
        scores: (batch, rows, columns).
        weights: the same.
        axis: ``columns`` or ``rows``, over which the softmax ran; ``other`` for any other.
        product: of queries and keys; None where the scores came from elsewhere.
        mixing: None where the weights met no values.
        doubt: an operation in between that is none of those that are known.
        is_used: whether the weights entered something else than a product with values.
    """

    softmax: Softmax
    scores: Tensor
    weights: Tensor
    axis: str
    product: Product | None
    mixing: Mixing | None
    doubt: Event | None
    is_used: bool = False


def chains_of(events: Sequence[Event], softmax: Softmax, learned: AbstractSet[int]) -> list[Chain]:
    """What stands before and behind a softmax, once for each product that its weights enter.

    Args:
        events: of all cells, in order.
        softmax: one of theirs.
        learned: where parameters lie.
    """
    laid = softmax.scores.unsqueeze(0) if softmax.scores.ndim == 1 else softmax.scores
    scores, weights = (
        tensor.detach().double().reshape(-1, *laid.shape[-2:])
        for tensor in (softmax.scores, softmax.weights)
    )
    axis = {-1: "columns", -2: "rows"}.get(softmax.axis, "other")
    first = softmax.events[0]
    if softmax.fused:
        product, mixing = _fused(first, weights)
        return [Chain(softmax, scores, weights, axis, product, mixing, None)]
    path, event, doubt = _before(events, first)
    product = None if event is None else _product(events, event, path, scores)
    if product is not None and learned & set(product.event.reads):
        product = replace(product, is_turned=False)  # of a layer, most likely
    behind, later = _behind(events, softmax)
    mixings = [_mixing(each, places, weights) for each, places in behind]
    strange = doubt if product is None and event is None else None
    if behind and not any(mixings):
        strange = behind[0][0]
    elif event is not None and product is None:
        strange = between(events, event, first, masking=True) or first
    is_used = any(_meets(event, later) for event in events if event.place > first.place)
    alone = Chain(softmax, scores, weights, axis, product, None, strange, is_used)
    return [replace(alone, mixing=mixing) for mixing in mixings if mixing is not None] or [alone]


def _meets(event: Event, places: set[int]) -> bool:
    """Whether an operation changes what lies there by another tensor of numbers."""
    both = [t for t in event.operands if t.is_floating_point() and t.numel() > 1]
    changes = event.operator in _SCALING | _MASKING
    return changes and len(both) > 1 and bool(places.intersection(event.reads))


def _fused(event: Event, weights: Tensor) -> tuple[Product, Mixing] | tuple[None, None]:
    query, key, value = (t.detach().double() for t in event.args[:3])
    if event.output is None or query.shape[:-2] != key.shape[:-2]:
        return None, None
    query, key, value = (t.reshape(-1, *t.shape[-2:]) for t in (query, key, value))
    output = event.output.detach().double().reshape(-1, *event.output.shape[-2:])
    given = event.kwargs.get("scale")
    scale = query.shape[-1] ** -0.5 if given is None else float(given)
    product = Product(event, query, key, scale, scale, True)
    return product, Mixing(event, weights, False, value, output, False, event.reads[2])


def maker(events: Sequence[Event], address: int, before: int) -> Event | None:
    """The last operation that wrote to a place."""
    later = (e for e in reversed(events) if e.place < before and address in e.writes)
    return next(later, None)


def _before(
    events: Sequence[Event], softmax: Event
) -> tuple[list[Event], Event | None, Event | None]:
    """The operations from the scores back to the product that they come from, and that product.

    The third is the first operation that is none of those that are known.
    """
    doubt: Event | None = None
    stack: list[tuple[int, int, list[Event]]] = [
        (address, softmax.place, []) for address in reversed(softmax.reads)
    ]
    seen: set[tuple[int, int]] = set()
    while stack:
        address, place, path = stack.pop()
        made = maker(events, address, place)
        if made is None or (address, made.place) in seen:
            continue
        seen.add((address, made.place))
        if made.operator in PRODUCTS:
            return path, made, None
        if made.operator not in _BETWEEN:
            is_number = made.output is not None and made.output.is_floating_point()
            doubt = doubt or (made if made.reads and is_number else None)
            continue
        inner = [(a, made.place, [*path, made]) for a in reversed(made.reads)]
        stack += inner
    return [], None, doubt


def _scaling(event: Event) -> float | None:
    """The number with which an operation multiplies a tensor; None where it does not."""
    if event.operator not in _SCALING or len(event.args) < 2:
        return None
    pair = list(event.args[:2])
    if isinstance(pair[0], Tensor) and pair[0].numel() == 1:
        pair.reverse()
        if event.operator.startswith(("div", "true")):
            return None
    other = pair[1]
    number = float(other) if not isinstance(other, Tensor) or other.numel() == 1 else None
    if number is None or number == 0:
        return None
    return 1 / number if event.operator.startswith(("div", "true")) else number


def between(events: Sequence[Event], first: Event, last: Event, *, masking: bool) -> Event | None:
    """The last operation between two that masks what the first gave, or that scales it.

    Args:
        events: of all cells.
        first: of the two.
        last: of the two.
        masking: which is wanted.
    """
    reached, found = set(first.writes), None
    for event in events:
        if first.place < event.place < last.place and reached.intersection(event.reads):
            reached.update(event.writes)
            is_single = _scaling(event) is not None
            is_mask = event.operator in _MASKING | {"mul", "mul_"} and not is_single
            if is_mask if masking else is_single:
                found = event
    return found


def origin(events: Sequence[Event], address: int, before: int) -> tuple[Event | None, float, bool]:
    """What made a tensor, but for views and numbers that it was multiplied with.

    Args:
        events: of all cells.
        address: where the tensor lies.
        before: the place of the operation that reads it.

    Returns:
        The operation, None where none did; the numbers, multiplied; whether it was divided or
        multiplied by something else, as unit vectors are.
    """
    number = 1.0
    while (made := maker(events, address, before)) is not None:
        factor = _scaling(made)
        if factor is None and made.operator not in SAME:
            is_bent = made.operator in _SCALING and len(made.operands) == 2
            return made, number, is_bent
        number *= 1.0 if factor is None else factor
        if not made.reads:
            return made, number, False
        address, before = made.reads[0], made.place
    return None, number, False


def _product(
    events: Sequence[Event], event: Event, path: list[Event], scores: Tensor
) -> Product | None:
    """The two factors, laid as the scores; None where they are laid otherwise."""
    left, right = (event.args[place].detach().double() for place in PRODUCTS[event.operator])
    turned = [_is_turned(tensor) for tensor in (left, right)]
    if right.ndim == 1:  # a matrix times one vector: the query, with all the keys
        left, right = right[None, None], left[None]
    elif left.ndim < 2 or left.ndim != right.ndim:
        return None
    else:
        left, right = left.reshape(-1, *left.shape[-2:]), right.mT.reshape(-1, *right.mT.shape[-2:])
    after = 1.0
    for step in path:
        factor = _scaling(step)
        after *= 1.0 if factor is None else factor
    made = [origin(events, address, event.place) for address in event.reads[:2]]
    folded = after * made[0][1] * made[1][1]
    are_made = all(m is not None and m.operator in _MADE for m, _, _ in made)
    is_turned = any(turned) or left.shape[0] > 1 or are_made
    for first, second in ((left, right), (right, left)):
        raw = first @ second.mT
        if raw.numel() != scores.numel() or raw.shape[-2:] != scores.shape[-2:]:
            continue
        if float(near(scores, raw.reshape(scores.shape) * after).double().mean()) > 0.2:
            return Product(event, first, second, after, folded, is_turned)
    return None


def near(one: Tensor, other: Tensor) -> Tensor:
    """Where two agree to rounding."""
    finite = other[other.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    return (one - other).abs() <= 1e-4 * max(largest, 1e-3)


def _is_turned(tensor: Tensor) -> bool:
    """Whether a matrix lies in memory by columns."""
    if tensor.ndim < 2 or 1 in tensor.shape[-2:]:
        return False  # nobody knows
    return tensor.stride(-2) == 1 and tensor.stride(-1) > 1


def _behind(
    events: Sequence[Event], softmax: Softmax
) -> tuple[list[tuple[Event, set[int]]], set[int]]:
    """The products of what came of the weights, and where that lay then; and in the end."""
    reached = {address for event in softmax.events for address in event.writes}
    last = softmax.events[-1].place
    found: list[tuple[Event, set[int]]] = []
    for event in events:
        if event.place <= last or not reached.intersection(event.reads):
            continue
        if event.operator in PRODUCTS:
            found.append((event, set(reached)))
        elif event.operator == "mul" and (total := _summed(events, event)) is not None:
            found.append((total, set(reached)))
        elif event.output is not None and event.output.numel() >= softmax.weights.numel():
            reached.update(event.writes)
    return found, reached


def _summed(events: Sequence[Event], event: Event) -> Event | None:
    """The sum over the last axis but one of what was multiplied, as one product with both."""
    for total in events:
        if total.place > event.place and event.writes[0] in total.reads:
            axes = total.args[1] if total.operator == "sum" and len(total.args) > 1 else ()
            if len(event.operands) != 2 or event.output is None or len(axes) != 1:
                return None
            over = axes[0] if axes[0] < 0 else axes[0] - event.output.ndim
            pair = [t for t in event.operands if t.ndim > 1]
            if over != -2 or len(pair) != 2 or {t.shape[-1] == 1 for t in pair} != {True, False}:
                return None
            weights, value = sorted(pair, key=lambda t: t.shape[-1] != 1)
            if value.shape[-2] != weights.shape[-2]:
                return None
            is_first = event.operands[0] is weights
            reads = event.reads if is_first else event.reads[::-1]
            matrix = value.shape[:-2].numel() == 1
            args = (weights[..., 0], value.reshape(value.shape[-2:]) if matrix else value)
            return replace(total, name="aten.matmul.default", args=args, reads=reads)
    return None


def _mixing(event: Event, reached: set[int], weights: Tensor) -> Mixing | None:
    """Weights times values; None where the weights are not those of the softmax any more."""
    left, right = (event.args[place].detach().double() for place in PRODUCTS[event.operator])
    is_left = event.reads[0] in reached
    if is_left and event.reads[1] in reached:
        return None
    held, other = (left, right) if is_left else (right, left)
    is_value_turned = not is_left and other.ndim > 1 and not _is_turned(other)
    output = event.output
    assert output is not None
    output = output.detach().double()
    if held.ndim == 1:  # one query
        held, output = held[None], output[None]
    elif other.ndim == 1:  # values of one number each
        other, output = other[:, None], output[:, None]
    elif not is_left:
        held, output = held.mT, output.mT
    value = other if is_left else other.mT
    held, value, output = (t.reshape(-1, *t.shape[-2:]) for t in (held, value, output))
    address = event.reads[1 if is_left else 0]
    # What the sum runs over is the last axis of what is held.
    for over_rows, laid in ((False, held), (True, held.mT)):
        fits = laid.shape[-1] == value.shape[-2] and value.shape[0] in (1, laid.shape[0])
        if fits and laid.shape == weights.shape and _is_made_of(laid, weights):
            return Mixing(event, laid, over_rows, value, output, is_value_turned, address)
    return None


def _is_made_of(now: Tensor, weights: Tensor) -> bool:
    """Whether weights are those of the softmax, or what a mask and a number made of them."""
    kept = (now != 0) & (weights != 0) & ~weights.isnan()
    if not bool(kept.any()) or not torch.equal(now.isnan(), weights.isnan()):
        return False
    ratio = now[kept] / weights[kept]
    if bool(((ratio / ratio.median() - 1).abs() < 1e-3).all()):
        return True
    left = weights.masked_fill(now == 0, 0)
    return any(bool(near(now, left / left.sum(axis, keepdim=True)).all()) for axis in (-1, -2))
