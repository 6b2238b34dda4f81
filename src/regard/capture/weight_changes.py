"""What becomes of scores, exponentials and weights on which one more operation has run.

They are scores with one step more, or scores that are lost; weights that are still what the softmax
gave, or are not. Which step an operation is, ``score_operations.py`` knows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.element_axes import Axes
from regard.capture.score_chain import Step, raised
from regard.capture.tensor_tracks import (
    Drawn,
    Exponentials,
    Lost,
    Noise,
    Outcome,
    Parts,
    Scores,
    Stage,
    Totals,
    Track,
    Tracks,
    Weights,
    modules_of,
    storage_key,
)
from regard.capture.weight_integrity import CHANCE, Fate, fate_in_place, fate_of
from regard.capture.weight_mixing import (
    change_of,
    has_no_keys,
    is_mutable,
    is_of_rows,
    other_axis_words,
    other_rows_words,
    place_of,
    tensors_in,
)
from regard.tracing.tracer import Operation, apart

__all__ = ["Changes", "stepped"]

_StepOn = Callable[[Axes], Step]


class Changes:
    """Notes what becomes of scores, exponentials and weights.

    Args:
        tracks: what the storages hold, kept up to date.
    """

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self._changed: dict[Outcome, tuple[str, str]] = {}

    def unmet(self) -> list[tuple[str, str]]:
        """The modules whose weights were changed and met no value as they were, and the reasons."""
        changed, self._changed = self._changed, {}
        return [told for outcome, told in changed.items() if not outcome.met]

    def _note(self, weights: Weights, trouble: str | None) -> None:
        """Note that others were made of weights whose attention was found."""
        if trouble is not None and weights.trouble is None and weights.name is not None:
            self._changed.setdefault(weights.outcome, (weights.name, trouble))

    def pass_on(self, operation: Operation) -> None:
        """Take note of an operation that none of the listeners knows."""
        if operation.func in CHANCE:
            self._tracks.put(operation.output, None, Noise())
            return
        if not self._tracks:
            return
        output = operation.output
        if isinstance(output, tuple) and output:
            output = cast(object, output[0])
        if not isinstance(output, Tensor) or output.is_nested or operation.func in _BLIND:
            return
        for source in tensors_in(operation.args):
            track = self._tracks.of(source)
            if track is None:
                continue
            if isinstance(track.stage, Noise):
                if output.numel() == source.numel() and _is_of_one_tensor(operation):
                    self._tracks.put(output, None, track.stage)
                continue
            if isinstance(track.stage, Parts):
                self.pass_parts(operation, source, track.stage)
                return
            if isinstance(track.stage, Weights):
                if operation.func is aten.stack.default and self._restack(operation, output):
                    return
                if not track.lies_in(output) or is_mutable(operation):
                    self._weigh(operation, source, output)
                return
            if track.lies_in(output):
                if not is_mutable(operation):
                    return
            elif output.numel() != source.numel() and not self._are_others(
                operation, track, source, output
            ):
                continue
            if isinstance(track.stage, Lost):
                self._tracks.put(output, None, track.stage)
            elif not isinstance(track.stage, Totals | Drawn):
                self.lose(operation, source)
            return

    def _are_others(
        self, operation: Operation, track: Track, source: Tensor, output: Tensor
    ) -> bool:
        """Whether more or fewer numbers than the scores were are scores of queries and keys yet."""
        stage = track.stage.scores if isinstance(track.stage, Exponentials) else track.stage
        if not isinstance(stage, Scores) or output.numel() == 1:
            return False
        if any(map(self._tracks.is_parameter, tensors_in(operation.args))):
            return False  # what a layer makes of them are features, not scores
        return not is_of_rows(operation, stage.product, track.axes, source, output)

    def pass_parts(self, operation: Operation, source: Tensor, parts: Parts) -> None:
        """Scores or weights in parts, on which an operation has run that knows no whole."""
        output = next(tensors_in((operation.output,)), None)
        if output is None or not output.is_floating_point():
            return
        in_place = storage_key(output) == storage_key(source)
        if in_place and not (is_mutable(operation) and parts.are_in(output)):
            return
        weights = parts.weights
        if weights is not None:
            trouble = weights.trouble or change_of(operation, weights.line)
            self._tracks.put(output, None, replace(weights, trouble=trouble, meeting=None))
        elif in_place or output.numel() == source.numel():
            self._tracks.put(output, None, Lost(parts.through))

    def mix(self, operation: Operation, source: Tensor) -> None:
        """Weights go through something that makes others of them."""
        track, output = self._tracks.of(source), operation.output
        if track is not None and isinstance(track.stage, Weights) and isinstance(output, Tensor):
            weights = track.stage
            trouble = weights.trouble or change_of(operation, weights.line)
            changed = replace(weights, trouble=trouble, powers=None, meeting=None)
            self._note(weights, trouble)
            self._tracks.put(output, None, changed)
        elif track is not None and isinstance(track.stage, Parts):
            self.pass_parts(operation, source, track.stage)

    def extend(self, operation: Operation, source: Any, *steps: _StepOn) -> None:
        """Scores, exponentials or weights on which one more operation has run.

        Args:
            operation: what has run.
            source: the argument that held them.
            steps: what it did, given the axes of its output.
        """
        track = self._tracks.of(source)
        output = cast(Tensor, operation.output)
        if track is None or not isinstance(track.stage, Scores | Exponentials | Weights):
            self.pass_on(operation)
        elif isinstance(track.stage, Weights):
            self._weigh(operation, source, output, steps)
        else:
            found = None
            if track.axes is not None:
                found = _extended(track.stage, track.axes, source, output, steps)
            if found is None:
                self.lose(operation, source)
            else:
                self._tracks.put(output, found[1], found[0])

    def _weigh(
        self, operation: Operation, source: Tensor, output: Tensor, steps: Sequence[_StepOn] = ()
    ) -> None:
        """Weights on which one more operation has run, which may make them others."""
        track = cast(Track, self._tracks.of(source))
        weights = cast(Weights, track.stage)
        if output.is_complex():
            self.mix(operation, source)
        if not output.is_floating_point() or has_no_keys(operation, track, source, output):
            return
        chance = {"dropped": self._is_dropped(operation), "thinned": weights.thinned}
        in_place, powers = track.lies_in(output), None
        axes = track.axes if in_place else _axes_after(track.axes, source, output)
        dim = None if axes is None else axes.along(weights.normal, weights.length)
        with apart():
            if in_place:
                whole = output if axes is None else axes.laid_over(output)
                fate = fate_in_place(operation, whole, dim, short=weights.short, **chance)
            else:
                fate = fate_of(operation, source, output, dim, **chance)
            weights, fate = _emptied(weights, axes, fate)
        changed = fate.changed
        if weights.powers is not None:
            scores, seen = weights.powers
            if not changed:
                moved = seen if in_place else _axes_after(seen, source, output)
                powers = None if moved is None else (scores, moved)
            elif steps:
                found = _extended(Exponentials(scores), seen, source, output, steps)
                powers = None if found is None else (cast(Exponentials, found[0]).scores, found[1])
        trouble = weights.trouble
        if changed and trouble is None:
            trouble = change_of(operation, weights.line)
        known = replace(weights, trouble=trouble, powers=powers, thinned=fate.thinned)
        if not self._meets_value(operation, track, source, output):
            self._note(weights, trouble)
        self._tracks.put(output, axes, known)

    def _meets_value(
        self, operation: Operation, track: Track, source: Tensor, output: Tensor
    ) -> bool:
        """Whether weights are multiplied with a value, element by element, to be summed later."""
        weights = cast(Weights, track.stage)
        written_out = source.shape[-1:] == (1,) and output.shape[-1] > 1
        if not written_out or weights.trouble is not None or operation.func not in _PRODUCTS:
            return False
        seen = None if track.axes is None else track.axes.seen_as(source)
        axis = None if seen is None else seen.along(weights.normal, weights.length)
        value = operation.args[1] if operation.args[0] is source else operation.args[0]
        if axis is not None and weights.normal and weights.name is not None:
            from_last = axis - source.ndim
            if value.ndim < -from_last or value.shape[from_last] == 1:
                told = weights.name, other_axis_words(weights.line)
                self._changed.setdefault(weights.outcome, told)
                return True
        if not weights.settle() and weights.name is not None:
            told = weights.name, other_rows_words(weights.line)
            self._changed.setdefault(weights.outcome, told)
            return True
        weights.meet()
        return True

    def _restack(self, operation: Operation, output: Tensor) -> bool:
        """Whether a stack holds weights in the order in which their softmaxes were taken."""
        starts: list[tuple[object, object, int]] = []
        seen: list[Axes | None] = []
        tensors = cast("list[Tensor]", operation.args[0])
        for tensor in tensors:
            track = self._tracks.of(tensor)
            if track is None or not isinstance(track.stage, Weights) or track.stage.trouble:
                return False
            seen.append(None if track.axes is None else track.axes.seen_as(tensor))
            mark, start = track.stage.origin or (None, 0)
            starts.append((track.stage.outcome, mark, start + (seen[-1].start if seen[-1] else 0)))
        for (outcome, mark, start), (later, other, after) in pairwise(starts):
            alike = outcome is later or (mark is other and mark is not None)
            if alike and after <= start:
                return False
        first = cast(Track, self._tracks.of(tensors[0]))
        weights = replace(cast(Weights, first.stage), powers=None)
        if any(outcome is not starts[0][0] for outcome, _, _ in starts):
            self._tracks.put(output, None, replace(weights, meeting=None))
            return True
        dim = operation.args[1] if len(operation.args) > 1 else 0
        axes = _stacked(seen, dim % output.ndim, output)
        if axes is None or output.numel() != math.prod(cast(Axes, first.axes).sizes):
            return False
        self._tracks.put(output, axes, weights)
        return True

    def _is_dropped(self, operation: Operation) -> bool:
        """Whether an argument of an operation was drawn by chance, as dropout does."""
        stages = map(self._tracks.stage_of, tensors_in(operation.args))
        return any(isinstance(stage, Noise) for stage in stages)

    def lose(self, operation: Operation, source: Tensor) -> None:
        """Scores or weights go through something that has no place in an AttentionMatrix."""
        output = operation.output
        track = self._tracks.of(source)
        if isinstance(output, Tensor) and track is not None and not track.lies_in(output):
            with apart():
                alike = source.dtype == output.dtype and source.layout == output.layout
                idle = alike and torch.equal(source, output)
            if idle:
                self.go_on(operation, source, track, track.stage)
                return
        if track is not None and isinstance(track.stage, Weights):
            self.mix(operation, source)
            return
        stage = None if track is None else track.stage
        scores = stage.scores if isinstance(stage, Exponentials) else stage
        pooled = None
        if isinstance(scores, Scores) and next(tensors_in((output,))).numel() != source.numel():
            pooled = scores.product.mark
        lost = Lost(place_of(operation), modules_of(stage), pooled)
        for tensor in tensors_in((output,)):
            if tensor.is_floating_point():
                self._tracks.put(tensor, None, lost)

    def go_on(self, operation: Operation, source: Tensor, track: Track, stage: Stage) -> None:
        """What a storage holds goes on in another one, element by element."""
        output = cast(Tensor, operation.output)
        seen = _axes_after(track.axes, source, output)
        if isinstance(stage, Weights) and stage.powers is not None:
            powers = _axes_after(stage.powers[1], source, output)
            stage = replace(stage, powers=None if powers is None else (stage.powers[0], powers))
        if seen is None and isinstance(stage, Scores | Exponentials):
            lost = Lost(place_of(operation), modules_of(stage))
            self._tracks.put(output, None, lost)
        else:
            self._tracks.put(output, seen, stage)


def stepped(stage: Scores | Exponentials, steps: Iterable[Step]) -> Scores | Exponentials | None:
    """A stage with some steps more; None where one has no like before the exponential."""
    if isinstance(stage, Scores):
        return replace(stage, steps=(*stage.steps, *steps))
    before = [raised(step) for step in steps]
    if None in before:
        return None
    more = cast(list[Step], before)
    return Exponentials(replace(stage.scores, steps=(*stage.scores.steps, *more)))


def _extended(
    stage: Scores | Exponentials,
    axes: Axes,
    source: Tensor,
    output: Tensor,
    steps: Sequence[_StepOn],
) -> tuple[Scores | Exponentials, Axes] | None:
    """A stage with some steps more, and the axes of the output's storage."""
    seen = axes.seen_as(source)
    moved = None if seen is None else seen.moved(output)
    if seen is None or moved is None:
        return None
    found = stepped(stage, [step(moved) for step in steps])
    if found is None or source.data_ptr() != output.data_ptr():
        return None if found is None else (found, moved)
    return None if math.prod(seen.sizes) != math.prod(axes.sizes) else (found, axes)


def _emptied(weights: Weights, axes: Axes | None, fate: Fate) -> tuple[Weights, Fate]:
    """Weights that know which of their rows were made 0; changed where the matrix cannot say it."""
    if fate.emptied is None:
        return weights, fate
    rows = None
    if weights.meeting is not None and axes is not None:
        rows = weights.meeting.rows(fate.emptied, axes)
    if rows is None:
        return weights, fate._replace(changed=True)
    if weights.emptied is not None:
        rows |= weights.emptied
    weights = replace(weights, emptied=rows)
    if not weights.outcome.is_taken:
        weights.outcome.emptied = rows
    return weights, fate


def _stacked(seen: Sequence[Axes | None], dim: int, output: Tensor) -> Axes | None:
    """The axes of a stack of views that lie one step after another; None where they do not."""
    views = [axes for axes in seen if axes is not None]
    steps = {later.start - axes.start for axes, later in pairwise(views)} or {0}
    if len(views) < len(seen) or len(steps) > 1 or len({axes.places for axes in views}) > 1:
        return None
    places = views[0].places
    return Axes.of(output, (*places[:dim], *steps, *places[dim:]), views[0].start)


def _is_of_one_tensor(operation: Operation) -> bool:
    """Whether all of its arguments but one are numbers."""
    return sum(tensor.numel() > 1 for tensor in tensors_in(operation.args)) == 1


def _axes_after(axes: Axes | None, source: Tensor, output: Tensor) -> Axes | None:
    seen = None if axes is None else axes.seen_as(source)
    return None if seen is None else seen.moved(output) or seen.reshaped(output)


aten = torch.ops.aten
_PRODUCTS = (aten.mul.Tensor, aten.multiply.Tensor)
_BLIND = (
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default),
    *(aten.full_like.default, aten.rand_like.default, aten.randn_like.default),
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default),
    aten.new_full.default,
)
"""Operations that take a tensor for its shape alone."""
