"""The operations that models write between a product and its softmax: which step each one is."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.arithmetic import DIFFERENCES, MULTIPLICATIONS, QUOTIENTS, SUMS, alpha_of
from regard.capture.element_axes import Axes
from regard.capture.fills import ASSIGNMENTS, assigned, marked
from regard.capture.part_gathering import JOINS, Gathering
from regard.capture.score_chain import Bound, Fill, Plus, Sink, Tanh, Times, Zeros
from regard.capture.tensor_tracks import (
    Chosen,
    Exponentials,
    Lost,
    Parts,
    Scores,
    Track,
    Tracks,
    Weights,
    modules_of,
)
from regard.capture.weight_changes import Changes, stepped
from regard.capture.weight_mixing import place_of, tensors_in
from regard.tracing.tracer import Listener, Operation, apart

__all__ = ["COPIES", "ScoreOperations"]


class ScoreOperations:
    """Hears the operations on scores, exponentials and weights that are known by name.

    Args:
        tracks: what the storages hold.
        changes: is told of each step.
        gathering: is told of what is put together of parts.
    """

    def __init__(self, tracks: Tracks, changes: Changes, gathering: Gathering) -> None:
        self._tracks = tracks
        self._changes = changes
        self._gathering = gathering

    @property
    def listeners(self) -> Mapping[Callable[..., Any], Listener]:
        """Who is to be told of which operation."""
        return {
            operation: getattr(self, kind)
            for kind, operations in _OPERATIONS.items()
            for operation in operations
        }

    def divide(self, operation: Operation) -> None:
        """Numbers divided by others."""
        source, by = operation.args[:2]
        self._changes.extend(operation, source, lambda axes: Times(by, axes, divides=True))

    def multiply(self, operation: Operation) -> None:
        """A product, element by element."""
        source, by = operation.args[:2]
        if not self._is_source(source):
            source, by = by, source
        if self._is_masked(source) and isinstance(by, Tensor) and by.numel() > 1:
            with apart():
                spoilt = bool(cast(Tensor, operation.output).isnan().any())
            if spoilt:  # -inf times 0
                self._changes.lose(operation, source)
                return
        self._changes.extend(operation, source, lambda axes: Times(by, axes))

    def negate(self, operation: Operation) -> None:
        """Numbers with the other sign."""
        self._changes.extend(operation, operation.args[0], lambda axes: Times(-1.0, axes))

    def add(self, operation: Operation) -> None:
        """A sum."""
        self._add(operation, alpha_of(operation))

    def subtract(self, operation: Operation) -> None:
        """A difference."""
        self._add(operation, -alpha_of(operation))

    def subtract_from(self, operation: Operation) -> None:
        """A number less the scores."""
        source, number = operation.args[:2]
        factor = -alpha_of(operation)
        self._changes.extend(
            operation, source, lambda axes: Times(factor, axes), lambda axes: Plus(number, axes)
        )

    def _add(self, operation: Operation, factor: float) -> None:
        source, other = operation.args[:2]
        if not self._is_source(source):
            self._changes.extend(
                operation, other, lambda a: Times(factor, a), lambda a: Plus(source, a)
            )
        else:
            self._changes.extend(operation, source, lambda a: Plus(other, a, factor))

    def tanh(self, operation: Operation) -> None:
        """The hyperbolic tangent."""
        self._changes.extend(operation, operation.args[0], Tanh)

    def where(self, operation: Operation) -> None:
        """A choice between numbers."""
        where, chosen, other = operation.args[:3]
        if not self._is_source(chosen):
            self._fill(operation, other, where, chosen)
        else:
            self._fill(operation, chosen, where, other, inverted=True)

    def assign(self, operation: Operation) -> None:
        """Numbers put at some places."""
        source, (func, args) = operation.args[0], operation[:2]
        track = self._tracks.of(source)
        if track is None or not isinstance(track.stage, Scores | Exponentials):
            self._fill_weights(operation)
            return
        value = args[ASSIGNMENTS[func]]
        narrow = _narrow(operation)
        accumulates = func in _INDEX_PUTS and len(args) > 3 and args[3]
        in_place = track.lies_in(cast(Tensor, operation.output))
        if narrow is not None and not (in_place and _is_part(track, source)):
            self._fill(operation, source, narrow, value)
            return
        with apart():
            number = None if accumulates else _one_number(value)
            if number is None or (in_place and track.axes is None):
                where = None
            elif in_place:
                where = assigned(func, args, cast(Axes, track.axes))
            else:
                where = marked(func, args, source.shape)
        if number is None or where is None:
            self._changes.lose(operation, source)
        elif in_place:
            found = _filled(track.stage, Fill(where, cast(Axes, track.axes), number))
            if found is None:
                self._changes.lose(operation, source)
            else:
                self._tracks.put(source, track.axes, found)
        else:
            self._changes.extend(operation, source, lambda axes: Fill(where, axes, number))

    def topk(self, operation: Operation) -> None:
        """The largest numbers along an axis."""
        source, _, *dim = operation.args[:3]
        values, index = operation.output
        self._choose(operation, source, dim[0] if dim else -1, index, values)

    def gather(self, operation: Operation) -> None:
        """Numbers at some places along an axis."""
        source, dim, index = operation.args[:3]
        self._choose(operation, source, dim, index, cast(Tensor, operation.output))

    def _choose(
        self, operation: Operation, source: Tensor, dim: int, index: Tensor, values: Tensor
    ) -> None:
        track = self._tracks.of(source)
        axes = None if track is None or track.axes is None else track.axes.seen_as(source)
        if track is None or axes is None or not isinstance(track.stage, Scores):
            self._changes.pass_on(operation)
            return
        chosen = Chosen(track.stage, axes, index, dim % source.ndim, place_of(operation))
        self._tracks.put(values, None, chosen)

    def scatter(self, operation: Operation) -> None:
        """Numbers put at some places along an axis; scores that go back to their places."""
        target, dim, index, source = operation.args[:4]
        track, output = self._tracks.of(source), cast(Tensor, operation.output)
        chosen = track.stage if track is not None else None
        if not isinstance(chosen, Chosen):
            self.assign(operation)
            return
        with apart():
            same = dim % target.ndim == chosen.dim and torch.equal(index, chosen.index)
            where = marked(operation.func, operation.args, output.shape)
            number = -math.inf if bool(where.all()) else _one_number(output[~where])
        axes = chosen.axes.moved(output)
        if not same or number is None or axes is None:
            self._changes.lose(operation, source)
            return
        steps = (*chosen.scores.steps, Fill(where, axes, number, inverted=True))
        self._tracks.put(output, axes, replace(chosen.scores, steps=steps))

    def _fill_weights(self, operation: Operation) -> None:
        """Numbers put into weights, where 0 takes a key away."""
        narrow = _narrow(operation)
        source = operation.args[0]
        value = operation.args[ASSIGNMENTS[operation.func]]
        if narrow is None:
            self._changes.pass_on(operation)
        else:
            self._fill(operation, source, narrow, value)

    def _fill(
        self,
        operation: Operation,
        source: Any,
        where: Tensor,
        value: Any,
        *,
        inverted: bool = False,
    ) -> None:
        if not self._is_source(source):
            self._changes.pass_on(operation)
            return
        with apart():
            number = _one_number(value)
        if number is None:
            self._changes.lose(operation, source)
        else:
            self._changes.extend(
                operation, source, lambda axes: Fill(where, axes, number, inverted)
            )

    def triangle(self, operation: Operation) -> None:
        """A triangle of zeros."""
        source = operation.args[0]
        if not self._is_source(source):
            self._changes.pass_on(operation)
            return
        with apart():
            kept = torch.ones(source.shape[-2:], dtype=torch.bool, device=source.device)
            diagonal = operation.args[1] if len(operation.args) > 1 else 0
            lower = operation.func in _OPERATIONS["triangle"][:2]
            kept = kept.tril(diagonal) if lower else kept.triu(diagonal)
        self._changes.extend(operation, source, lambda axes: Zeros(kept, axes))

    def bound(self, operation: Operation) -> None:
        """Bounds far beyond any score change nothing but masked scores."""
        source, *bounds = (*operation.args, *operation.kwargs.values())
        if self._tracks.scores_of(source) is None:
            self._changes.pass_on(operation)
            return
        with apart():
            numbers = [_one_number(bound) for bound in bounds if bound is not None]
        if any(number is None or abs(number) < _BEYOND_SCORES for number in numbers):
            self._changes.lose(operation, source)
            return
        low = max((number for number in numbers if number is not None and number < 0), default=None)
        if low is None:
            self.copy(operation)
        else:
            self._changes.extend(operation, source, lambda axes: Bound(low, axes))

    def no_nan(self, operation: Operation) -> None:
        """Scores whose infinities are made the numbers that lie farthest out."""
        source = operation.args[0]
        named = dict(zip(("nan", "posinf", "neginf"), operation.args[1:], strict=False))
        low = {**named, **operation.kwargs}.get("neginf")
        if self._tracks.scores_of(source) is None:
            self._changes.pass_on(operation)
        elif low is not None and low > -_BEYOND_SCORES:
            self._changes.lose(operation, source)
        else:
            least = torch.finfo(source.dtype).min if low is None else float(low)
            self._changes.extend(operation, source, lambda axes: Bound(least, axes))

    def join(self, operation: Operation) -> None:
        """Scores that are put together, or with a column beside them."""
        if operation.func in _CATS and self._note_sink(operation):
            return
        if not self._gathering.join(operation):
            tensors = list(tensors_in(operation.args))
            at = [t for t in tensors if self._tracks.scores_of(t) is not None]
            if at:
                self._changes.lose(operation, at[0])
            else:
                self._changes.pass_on(operation)

    def _note_sink(self, operation: Operation) -> bool:
        """Whether scores have got a column beside them that is no scores."""
        tensors = cast(list[Tensor], operation.args[0])
        output = cast(Tensor, operation.output)
        dim: int = (operation.args[1] if len(operation.args) > 1 else 0) % output.ndim
        at = [i for i, t in enumerate(tensors) if self._tracks.scores_of(t) is not None]
        if len(at) != 1 or len(tensors) != 2:
            return False
        source, other = tensors[at[0]], tensors[1 - at[0]]
        track = cast(Track, self._tracks.of(source))
        axes = None if track.axes is None else track.axes.seen_as(source)
        if other.ndim != source.ndim or other.shape[dim] != 1 or axes is None:
            return False
        before = at[0] == 1
        start = axes.start - (axes.places[dim] if before else 0)
        scores = cast(Scores, track.stage)
        steps = (*scores.steps, Sink(other, axes, before))
        self._tracks.put(output, Axes.of(output, axes.places, start), replace(scores, steps=steps))
        return True

    def copy(self, operation: Operation) -> None:
        """A copy, of another dtype or in another shape."""
        source, output = operation.args[0], operation.output
        track = self._tracks.of(source)
        if track is None or track.lies_in(output):
            return
        if not isinstance(track.stage, Parts):
            self._changes.go_on(operation, source, track, track.stage)
        elif not self._gathering.copy(operation, track.stage):
            self._changes.pass_on(operation)

    def copy_into(self, operation: Operation) -> None:
        """Numbers put into a tensor that was there."""
        if self._gathering.copy_into(operation):
            return
        target, source = operation.args[:2]
        track, held = self._tracks.of(source), self._tracks.held_by(target)
        part = held is not None and _is_part(held, target)
        if track is not None and isinstance(track.stage, Parts):
            self._changes.pass_parts(operation, source, track.stage)
        elif held is not None and part and track is not None:
            self._spoil(operation, target, held)
        elif track is not None and track.axes is not None:
            self._changes.go_on(operation, source, track, track.stage)
        elif track is not None:
            self._tracks.put(target, None, track.stage)
        elif held is not None and not part:
            self._tracks.drop(target)
        else:
            self.assign(operation)

    def _spoil(self, operation: Operation, target: Tensor, held: Track) -> None:
        """Scores or weights in whose midst other ones were put."""
        stage = held.stage
        if isinstance(stage, Weights) or (isinstance(stage, Parts) and stage.weights is not None):
            self._changes.mix(operation, target)
        else:
            self._tracks.put(target, None, Lost(place_of(operation), modules_of(stage)))

    def _is_masked(self, tensor: object) -> bool:
        scores = self._tracks.scores_of(tensor)
        return scores is not None and any(isinstance(step, Fill | Plus) for step in scores.steps)

    def _is_source(self, tensor: object) -> bool:
        track = self._tracks.of(tensor)
        return track is not None and isinstance(track.stage, Scores | Exponentials | Weights)


def _filled(stage: Scores | Exponentials, fill: Fill) -> Scores | Exponentials | None:
    """A stage with one fill more; those of one number after another, as in a loop, are one."""
    last = stage.steps[-1] if isinstance(stage, Scores) and stage.steps else None
    if isinstance(stage, Exponentials) or not isinstance(last, Fill) or last.inverted:
        return stepped(stage, [fill])
    if last.axes is not fill.axes or last.value != fill.value:
        return stepped(stage, [fill])
    with apart():
        both = replace(fill, where=last.where | fill.where)
    return replace(stage, steps=(*stage.steps[:-1], both))


def _is_part(track: Track, view: Tensor) -> bool:
    """Whether a view leaves out something of what its storage holds."""
    if track.axes is not None:
        return math.prod(view.shape) != math.prod(track.axes.sizes)
    return view.nbytes < view.untyped_storage().nbytes()


def _narrow(operation: Operation) -> Tensor | None:
    """The mask of an assignment, broadcastable to its tensor; None where it names places."""
    if operation.func in _MASKED_FILLS:
        return operation.args[1]
    source, indices, *more = operation.args
    if operation.func not in _INDEX_PUTS or len(more) > 1:
        return None
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.bool:
        return None
    with apart():
        return indices[0].reshape(*indices[0].shape, *(1,) * (source.ndim - indices[0].ndim))


def _one_number(value: object) -> float | None:
    """The number that a value is everywhere; None where it is several."""
    if not isinstance(value, Tensor):
        return float(cast(float, value))
    first = value.flatten()[0] if value.numel() else None
    return float(first) if first is not None and bool((value == first).all()) else None


_BEYOND_SCORES = 1e4  # no score is as far from 0

aten = torch.ops.aten
_CATS = (aten.cat.default, aten.concat.default)
_INDEX_PUTS = (aten.index_put.default, aten.index_put_.default)
_MASKED_FILLS = (
    *(aten.masked_fill.Scalar, aten.masked_fill_.Scalar),
    *(aten.masked_fill.Tensor, aten.masked_fill_.Tensor),
)
COPIES = (
    *(aten.clone.default, aten._to_copy.default, aten.contiguous.default, aten.reshape.default),
    *(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default),
    *(aten.flatten.using_ints, aten.lift_fresh_copy.default),
)
"""The operations that copy a tensor, where that is needed."""

_OPERATIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": SUMS,
    "subtract": DIFFERENCES,
    "subtract_from": (aten.rsub.Scalar,),
    "multiply": MULTIPLICATIONS,
    "negate": (aten.neg.default, aten.neg_.default, aten.negative.default),
    "divide": QUOTIENTS,
    "tanh": (aten.tanh.default, aten.tanh_.default),
    "where": (*(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf),),
    "assign": tuple(func for func in ASSIGNMENTS if func is not aten.copy_.default),
    "topk": (aten.topk.default,),
    "gather": (aten.gather.default,),
    "scatter": (aten.scatter.src, aten.scatter_.src),
    "triangle": (aten.tril.default, aten.tril_.default, aten.triu.default, aten.triu_.default),
    "bound": (
        *(aten.clamp.default, aten.clamp_.default, aten.clamp_min.default, aten.maximum.default),
        *(aten.clamp_min_.default, aten.max.other),
    ),
    "no_nan": (aten.nan_to_num.default, aten.nan_to_num_.default),
    "join": JOINS,
    "copy": COPIES,
    "copy_into": (aten.copy_.default,),
}
