"""What lies between the projections and their product: nothing, positions, a norm, or a function.

Attention multiplies queries with keys as they were projected, turned by their positions, or normed.
A function of their numbers, relu say, makes something else of it. Which it is shows in what comes
of other columns: something linear adds up, and a norm does not see how long a vector is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Stages, found_stages
from regard.diagnosis.rotated_inputs import met
from regard.diagnosis.source_lines import score_product
from regard.diagnosis.subject import Subject
from regard.diagnosis.traced_run import Edit, Event

__all__ = [
    "Manner",
    "bending",
    "learned_distances",
    "learned_scale",
    "limit",
    "manner_of",
    "strange",
]

# Columns by the place of the projection that gave them, or by the role of an input.
_Columns = Mapping[Any, Tensor]
Manner = Literal["linear", "normed", "turned on one side", "turned unevenly", "other"]

_TOLERANCE = 1e-3
_LEAST = -1e4  # a number below is a mask
_CLAMPS = ("clamp", "clamp_min", "clamp_max", "hardtanh")
_CHOOSING = ("topk", "sort", "kthvalue")
_OF_NORMS = frozenset(
    ["pow", "sum", "mean", "rsqrt", "sqrt", "linalg_vector_norm", "clamp_min", "native_layer_norm"]
)
# What leaves query times key what it is, up to a number, a mask or a bias; and what only moves.
_PLAIN = frozenset(
    [
        "mul",
        "div",
        "add",
        "sub",
        "rsub",
        "masked_fill",
        "where",
        "tanh",
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "contiguous",
        "_to_copy",
        "to",
        "split",
        "select",
        "slice",
        "cat",
        "stack",
        "t",
        "alias",
        "neg",
        "unbind",
        "split_with_sizes",
        "copy",
    ]
)


def manner_of(subject: Subject, stages: Stages) -> Manner:
    """How the queries and keys that meet depend on what was projected.

    Args:
        subject: which runs.
        stages: of a run, in which one product of queries and keys was seen.
    """
    first, second = _columns(subject, stages, 1), _columns(subject, stages, 2)
    level = {key: tensor[:, :1].expand_as(tensor) for key, tensor in first.items()}
    both = {key: tensor + second[key] for key, tensor in first.items()}
    tried = [{key: number * t for key, t in first.items()} for number in (0, 1, 2, -1)]
    seen = [_met_of(subject, stages, columns) for columns in (*tried, second, both, level)]
    met_there = [one for one in seen if one is not None]
    if len(met_there) < len(seen):
        return "other"
    sides = [_Side(*(one[side] for one in met_there)) for side in (0, 1)]
    manners = [side.manner for side in sides]
    if "other" in manners:
        return "other"
    if sides[0].is_turned != sides[1].is_turned:
        return "turned on one side"
    if sides[0].is_turned and not _depends_on_distance(*(side.of_one for side in sides)):
        return "turned unevenly"
    return "normed" if "normed" in manners else "linear"


def _columns(subject: Subject, stages: Stages, seed: int) -> _Columns:
    """Random columns in place of those that were projected, (batch, tokens, columns)."""
    if not stages.projections:
        return dict(subject.inputs(seed))
    generator = torch.Generator().manual_seed(seed)
    return {
        p.event.place: torch.randn(p.columns.shape, generator=generator, device="cpu")
        for p in stages.projections
    }


def _met_of(subject: Subject, stages: Stages, columns: _Columns) -> tuple[Tensor, Tensor] | None:
    """The queries and keys that meet where other columns are projected."""
    if not stages.projections:
        inputs = {role: columns[role] for role in subject.inputs()}
        return met(found_stages(subject, inputs, projected=False))
    edits = {p.event.place: _put(p.places, columns[p.event.place]) for p in stages.projections}
    return met(found_stages(subject, subject.inputs(), edits=edits, projected=False))


def _put(places: Tensor, columns: Tensor) -> Edit:
    def edit(output: Tensor, _: tuple[Any, ...]) -> Tensor:
        flat = output.flatten()
        flat[places] = columns.to(flat)
        return flat.reshape(output.shape)

    return edit


@dataclass(frozen=True, eq=False)
class _Side:
    """Queries or keys as they meet, (batch, heads, tokens, head_dim), for several columns.

    Attributes:
        zero: for columns of 0.
        first: for some columns.
        twice: for twice as much.
        negative: for their negative.
        second: for others.
        both: for the sum.
        level: for the same columns at each token.
    """

    zero: Tensor
    first: Tensor
    twice: Tensor
    negative: Tensor
    second: Tensor
    both: Tensor
    level: Tensor

    @property
    def manner(self) -> Manner:
        """Whether it is linear but for what is added, or that divided by a length."""
        first, twice, negative, second, both = (
            tensor - self.zero
            for tensor in (self.first, self.twice, self.negative, self.second, self.both)
        )
        if _near(both, first + second) and _near(twice, 2 * first):
            return "linear"
        if not (_near(twice, first) and _near(negative, -first)):
            return "other"
        # The norm of a sum lies in the plane of both norms.
        across = second - _along(second, first)
        there = _along(both, first) + _along(both, across)
        return "normed" if _near(there, both) else "other"

    @property
    def of_one(self) -> Tensor:
        """What becomes of one vector at each token, but for what is added."""
        return self.level - self.zero

    @property
    def is_turned(self) -> bool:
        """Whether what becomes of one vector depends on where it stands."""
        return not _near(self.of_one, self.of_one[:, :, :1].expand_as(self.of_one))


def _depends_on_distance(query: Tensor, key: Tensor) -> bool:
    """Whether query times key is the same for all that are equally far apart."""
    if query.shape != key.shape:  # fewer heads of keys: a kernel repeats them
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT
    return _near(scores[..., 1:, 1:], scores[..., :-1, :-1])


def _along(one: Tensor, other: Tensor) -> Tensor:
    """The part of each vector that points along another one."""
    length = other.square().sum(-1, keepdim=True).clamp(min=1e-12)
    return (one * other).sum(-1, keepdim=True) / length * other


def _near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= _TOLERANCE * float(other.abs().max())


def bending(stages: Stages) -> Event | None:
    """The operation that norms queries or keys, or makes another function of what was projected.

    Args:
        stages: of a run.

    Returns:
        None where none was seen.
    """
    product = score_product(stages)
    if product is None:
        return None
    start = [a for p in stages.projections for a in p.event.writes] or stages.trace.entries
    first = min((p.event.place for p in stages.projections), default=-1)
    found = _led_to(stages, start, first, product.place)
    curved = [e for e in found if e.operator.removesuffix("_") not in _PLAIN - {"tanh"}]
    strange = [e for e in curved if e.operator not in _OF_NORMS]
    return next(iter((*strange, *curved)), None)


def strange(stages: Stages) -> Event | None:
    """The first operation, from query times key to the softmax, that is no scale, mask or bias.

    Args:
        stages: of a run.

    Returns:
        None where there is none.
    """
    behind = _behind_product(stages)
    return next((e for e in behind if e.operator.removesuffix("_") not in _PLAIN), None)


def _behind_product(stages: Stages) -> list[Event]:
    """The operations from query times key to the softmax."""
    product = score_product(stages)
    if product is None or stages.softmax is None or stages.softmax.fused:
        return []
    last = stages.softmax.events[0].place
    return _led_to(stages, product.writes, product.place, last)


def _led_to(stages: Stages, start: Iterable[int], first: int, last: int) -> list[Event]:
    """The operations between two places that read what the start leads to."""
    reached, found = set(start), list[Event]()
    for event in stages.trace:
        if first < event.place < last and reached.intersection(event.reads):
            reached.update(event.writes)
            found.append(event)
    return found


def learned_scale(subject: Subject, stages: Stages) -> Event | None:
    """The operation that multiplies queries, keys or scores with a number that is learned.

    Args:
        subject: which runs.
        stages: of a run.

    Returns:
        None where there is none: one number, or one for each head.
    """
    own = {p.untyped_storage().data_ptr() for p in subject.given.model.parameters()}
    moved, learned = stages.trace.moved, stages.trace.reached(own)
    for event in _scored(stages):
        scaling = event.operator.removesuffix("_") in ("mul", "div") and len(event.operands) == 2
        for tensor, address in zip(event.operands, event.reads, strict=False):
            single = tensor.numel() == 1 or tensor.shape[-1] == 1
            if scaling and single and address in learned and address not in moved:
                return event
    return None


def learned_distances(subject: Subject, stages: Stages) -> Event | None:
    """The operation that adds learned numbers by distance, one for each head, to the scores.

    Args:
        subject: which runs.
        stages: of a run.

    Returns:
        None where there is none.
    """
    own = {p.untyped_storage().data_ptr() for p in subject.given.model.parameters()}
    moved, learned = stages.trace.moved, stages.trace.reached(own)
    tokens = subject.layout.tokens
    fused = stages.softmax.events if stages.softmax is not None and stages.softmax.fused else ()
    adding = [e for e in _scored(stages) if e.operator in ("add", "add_")]
    for event in (*adding, *fused):
        for tensor, address in zip(event.operands, event.reads, strict=False):
            if tensor.shape[-2:] != (tokens, tokens) or address in moved or address not in learned:
                continue
            # What is looked up in a table may begin with the same number everywhere.
            is_level = torch.equal(tensor, tensor[..., :1, :1].expand_as(tensor))
            is_even = torch.equal(tensor[..., 1:, 1:], tensor[..., :-1, :-1])
            if is_even and not (is_level and address in own):
                return event
    return None


def limit(stages: Stages) -> Event | None:
    """The operation that would change larger scores, or more of them, and changed none.

    Args:
        stages: of a run.

    Returns:
        None where there is none.
    """
    for event in _scored(stages):
        name = event.operator.removesuffix("_")
        if name in _CHOOSING and event.place in {e.place for e in _behind_product(stages)}:
            return event
        # Lengths, which a norm holds above 0, have one number for each vector.
        if name in _CLAMPS and event.output is not None and event.output.shape[-1] > 1:
            before = event.args[0]
            if torch.equal(before.clamp(min=_LEAST), event.output.clamp(min=_LEAST)):
                return event
    return None


def _scored(stages: Stages) -> list[Event]:
    """The operations behind the projections, before the softmax, on what the inputs move."""
    if stages.softmax is None:
        return []
    moved, last = stages.trace.moved, stages.softmax.events[0].place
    first = min((p.event.place for p in stages.projections), default=-1)
    between = (e for e in stages.trace if first < e.place < last)
    return [e for e in between if moved.intersection(e.reads)]
