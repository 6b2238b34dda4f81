"""The ways to write a softmax: from scores to weights, by one operation or by several.

``softmax`` and ``log_softmax`` say it. ``exp`` of scores less their ``logsumexp``, exponentials
over their sum, the same with a mask as a factor, and weights that are masked and then made to sum
to 1 again do not: exponentials whose rows sum to 1 are a softmax, however they came to. A number
that is added to the sum is a sink.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TypeGuard, cast

import torch
from torch import Tensor

from regard.capture.arithmetic import MULTIPLICATIONS, QUOTIENTS, SUMS, alpha_of
from regard.capture.contractions import Mark
from regard.capture.element_axes import Axes, contiguous
from regard.capture.empty_rows import without_rows
from regard.capture.part_gathering import Gathering
from regard.capture.product_axes import Untold
from regard.capture.recorded_values import TakeValue
from regard.capture.score_chain import Beside, Plus, Times, attention
from regard.capture.score_operations import ScoreOperations
from regard.capture.tensor_tracks import (
    Chosen,
    Drawn,
    Exponentials,
    Finding,
    Lost,
    Outcome,
    Parts,
    Scores,
    Stage,
    Totals,
    Tracks,
    Weights,
    modules_of,
)
from regard.capture.value_axes import Meeting
from regard.capture.weight_changes import Changes
from regard.capture.weight_integrity import sums_to_one
from regard.capture.weight_mixing import has_no_keys
from regard.matrix.attention_matrix import AttentionMatrix
from regard.tracing.tracer import Listener, Operation, apart

__all__ = ["Softmaxes"]


class Softmaxes:
    """Hears how scores become weights, and finds their attention.

    What was found is given when it is asked for: weights may be masked once more, and made to sum
    to 1 again, before they meet the value.

    Args:
        tracks: what the storages hold.
        changes: is told what is none of this.
        gathering: is told of what is put together of parts.
        take: called with the module's name and the matrix of each attention, inside ``apart()``;
            gives what its value is to be given to.
        refuse: called with the module's name and the reason why its attention cannot be told.
    """

    def __init__(
        self,
        tracks: Tracks,
        changes: Changes,
        gathering: Gathering,
        take: Callable[[str, AttentionMatrix], TakeValue | None],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._refuse = refuse
        self._tracks = tracks
        self._changes = changes
        self._steps = ScoreOperations(tracks, changes, gathering)
        self._take = take
        self._found: list[Finding] = []

    @property
    def listeners(self) -> Mapping[Callable[..., object], Listener]:
        """Who is to be told of which operation: of those on scores, too."""
        named = {
            operation: cast(Listener, getattr(self, f"_{kind}"))
            for kind, operations in _OPERATIONS.items()
            for operation in operations
        }
        return {**self._steps.listeners, **named}

    def release(self) -> None:
        """Give what was found so far: from now on it stays as it is."""
        if self._found:
            found, self._found = self._found, []
            with apart():
                for finding in found:
                    finding.outcome.is_taken = True
                    matrix = without_rows(finding.matrix, finding.outcome.emptied)
                    take_value = self._take(finding.name, matrix)
                    if finding.meeting is not None:
                        finding.meeting.take = take_value

    def draw(self, exponentials: Tensor, dim: int, output: Tensor) -> None:
        """Note a product of exponentials and value: the sums of their rows may still divide it."""
        powers = self._tracks.powers_of(exponentials)
        if powers is not None:
            self._tracks.put(output, None, Drawn(*powers, dim - exponentials.ndim))

    def _softmax(self, operation: Operation) -> None:
        source, dim = operation.args[:2]
        track = self._tracks.of(source)
        if track is not None and isinstance(track.stage, Scores):
            axes = None if track.axes is None else track.axes.seen_as(source)
            self._normalise(operation, track.stage, axes, dim % source.ndim)
        elif track is not None and _is_lost(track.stage):
            reason = (
                f"{track.stage.through} stands between the product of query and key and its "
                "softmax, and is no scale, bias, softcap, mask or sink."
            )
            name = _owner(operation, modules_of(track.stage))
            pooled = track.stage.pooled if isinstance(track.stage, Lost) else None
            self._put(operation, dim % source.ndim, reason, name, pooled)
        else:
            self._changes.mix(operation, source)

    def _log_softmax(self, operation: Operation) -> None:
        source, dim = operation.args[:2]
        if self._tracks.scores_of(source) is None:
            self._changes.pass_on(operation)
            return
        with apart():
            total = source.logsumexp(dim, keepdim=True)
        self._changes.extend(operation, source, lambda axes: Plus(total, axes, -1.0))

    def _exp(self, operation: Operation) -> None:
        source, output = operation.args[0], cast(Tensor, operation.output)
        track = self._tracks.of(source)
        if track is None or track.axes is None or not isinstance(track.stage, Scores):
            self._changes.pass_on(operation)
            return
        scores = track.stage
        base = _BASES.get(operation.func)
        if base is not None:
            seen = track.axes.seen_as(source) or track.axes
            scores = replace(scores, steps=(*scores.steps, Times(math.log(base), seen)))
        self._changes.go_on(operation, source, track, Exponentials(scores))
        self._find_normal(operation, output)

    def _find_normal(self, operation: Operation, output: Tensor) -> bool:
        """Whether exponentials sum to 1 along an axis, so that they are weights."""
        powers = self._tracks.powers_of(output)
        if powers is None or not output.is_floating_point():
            return False
        with apart():
            axes = reversed(range(output.ndim))
            dim = next((axis for axis in axes if sums_to_one(output, axis)), None)
        if dim is not None:
            scores, axes = powers
            # Where rows sum to 1 again, what a sink took from them has come back.
            steps = tuple(step for step in scores.steps if not isinstance(step, Beside))
            self._normalise(operation, replace(scores, steps=steps), axes, dim)
        return dim is not None

    def _sum(self, operation: Operation) -> None:
        source, dims = operation.args[:2]
        powers = self._tracks.powers_of(source)
        track, output = self._tracks.of(source), cast(Tensor, operation.output)
        stage = None if track is None else track.stage
        keys_stay = (
            track is not None
            and isinstance(stage, Weights)
            and not has_no_keys(operation, track, source, output)
        )
        if powers is None or isinstance(stage, Parts) or keys_stay:
            self._changes.pass_on(operation)
        elif dims is not None and len(dims) == 1:
            kept = len(operation.args) > 2 and bool(operation.args[2])
            totals = Totals(*powers, dims[0] % source.ndim - source.ndim, kept)
            self._tracks.put(output, None, totals)

    def _add(self, operation: Operation) -> None:
        source, other = operation.args[:2]
        totals = self._totals_of(source)
        if totals is None:
            totals, other = self._totals_of(other), source
        if totals is None or alpha_of(operation) != 1:
            self._steps.add(operation)
            return
        beside = (*totals.beside, other)
        self._tracks.put(cast(Tensor, operation.output), None, replace(totals, beside=beside))

    def _totals_of(self, tensor: object) -> Totals | None:
        track = self._tracks.of(tensor)
        return track.stage if track is not None and isinstance(track.stage, Totals) else None

    def _multiply(self, operation: Operation) -> None:
        self._steps.multiply(operation)
        self._renormalise(operation)

    def _divide(self, operation: Operation) -> None:
        source, by = operation.args[:2]
        totals = self._totals_of(by)
        track = self._tracks.of(source)
        if totals is not None and track is not None and isinstance(track.stage, Drawn):
            self._finish(operation, track.stage, totals)
            return
        before = self._tracks.powers_of(source)
        finding = track.stage.finding if track and isinstance(track.stage, Weights) else None
        self._steps.divide(operation)
        if self._renormalise(operation) or totals is None or before is None:
            return
        if before[0] is totals.scores:
            dim = totals.dim % source.ndim
            self._normalise(operation, _with_sinks(totals), before[1], dim, finding)

    def _renormalise(self, operation: Operation) -> bool:
        """Whether exponentials, or weights that were changed, sum to 1 by now."""
        output = operation.output
        track = self._tracks.of(output)
        if track is None or not isinstance(output, Tensor):
            return False
        if isinstance(track.stage, Weights):
            if track.stage.trouble is None:
                return True
            return track.stage.powers is not None and self._find_normal(operation, output)
        return isinstance(track.stage, Exponentials) and self._find_normal(operation, output)

    def _finish(self, operation: Operation, drawn: Drawn, totals: Totals) -> None:
        """What exponentials have drawn is divided by their sums: an output of attention."""
        self._tracks.drop(cast(Tensor, operation.output))
        name = _owner(operation, drawn.scores.product.modules)
        if drawn.scores is not totals.scores or drawn.dim != totals.dim or name is None:
            return
        self._tracks.spend(drawn.scores.product)
        dim = drawn.dim % len(drawn.axes.sizes)
        found, trouble = self._attention(operation, _with_sinks(totals), drawn.axes, dim, None)
        if found is not None:
            self._found.append(Finding(name, found[0]))
            drawn.scores.product.mark.met = True
            self.release()
        elif trouble is not None:
            self._refuse(name, trouble)

    def _normalise(
        self,
        operation: Operation,
        scores: Scores,
        axes: Axes | None,
        dim: int,
        finding: Finding | None = None,
    ) -> None:
        """Weights follow from scores: the attention is known."""
        output = cast(Tensor, operation.output)
        name = _owner(operation, scores.product.modules)
        held = self._tracks.of(output)
        outcome, emptied = Outcome(), None
        if held is not None and isinstance(held.stage, Weights):
            finding, outcome = finding or held.stage.finding, held.stage.outcome
            emptied = outcome.emptied = held.stage.emptied  # no factor makes others of zeros
            outcome.is_taken = False
        self._tracks.spend(scores.product)
        found, trouble = self._attention(operation, scores, axes, dim, output)
        if finding is not None:
            self._found = [each for each in self._found if each is not finding]
        finding, meeting = None, None
        moved = None if trouble or axes is None else axes.moved(output)
        if found is not None and name is not None:
            meeting = None if moved is None else Meeting.of(output, moved, found[1], found[0].ndim)
            finding = Finding(name, found[0], meeting, outcome)
            self._found.append(finding)
        self._put(operation, dim, trouble, name)
        track = self._tracks.of(output)
        if track is not None and isinstance(track.stage, Weights) and moved is not None:
            short = any(isinstance(step, Beside) for step in scores.steps)
            powers = scores, moved
            known = replace(
                track.stage,
                powers=powers,
                finding=finding,
                short=short,
                meeting=meeting,
                outcome=outcome,
                origin=(scores.product.mark, moved.start),
                emptied=emptied,
            )
            self._tracks.put(output, track.axes, known)

    def _attention(
        self,
        operation: Operation,
        scores: Scores,
        axes: Axes | None,
        dim: int,
        weights: Tensor | None,
    ) -> tuple[tuple[AttentionMatrix, Axes] | None, str | None]:
        """The attention of some scores and its axes in their product, or why it cannot be told."""
        try:
            with apart():
                if axes is None:
                    raise Untold("is taken of a part of the scores that cannot be told.")
                given = operation.inputs() if len(axes.sizes) == 3 else []
                return attention(scores.product, scores.steps, axes, dim, weights, given), None
        except Untold as cause:
            return None, f"the softmax ({operation.place()}) {cause}"
        except (TypeError, ValueError, RuntimeError, MemoryError) as cause:
            return None, str(cause)

    def _put(
        self,
        operation: Operation,
        dim: int,
        trouble: str | None,
        name: str | None,
        pooled: Mark | None = None,
    ) -> None:
        output = cast(Tensor, operation.output)
        places = contiguous(output.shape)
        normal = places[dim] if output.shape[dim] > 1 else 0
        weights = Weights(
            normal, output.shape[dim], name, operation.place(), trouble, pooled=pooled
        )
        self._tracks.put(output, Axes.of(output, places), weights)


def _owner(operation: Operation, before: Collection[str]) -> str | None:
    """The innermost of the modules that are running, and were before, as the scores were made.

    Not a ``nn.Softmax`` that is a module of its own, and that several layers may share.
    """
    running = operation.running()
    both = (name for name in running if name in before)
    return next(both, next(iter(running), None))


def _is_lost(stage: Stage) -> TypeGuard[Lost | Chosen | Parts]:
    """Whether scores cannot be told any more."""
    if isinstance(stage, Parts):
        return stage.weights is None
    return isinstance(stage, Lost | Chosen)


def _with_sinks(totals: Totals) -> Scores:
    """Scores beside which a sum counts what was added to it."""
    steps = list(totals.scores.steps)
    for number in totals.beside:
        if isinstance(number, Tensor) and number.ndim and not totals.kept:
            with apart():
                number = number.unsqueeze(totals.dim)
        steps.append(Beside(number, totals.axes))
    return replace(totals.scores, steps=tuple(steps))


aten = torch.ops.aten
_BASES: dict[Callable[..., object], float] = {aten.exp2.default: 2.0, aten.exp2_.default: 2.0}
_OPERATIONS: dict[str, tuple[Callable[..., object], ...]] = {
    "softmax": (
        *(aten._softmax.default, aten._softmax.out, aten.softmax.int, aten.softmax.int_out),
        *(aten._safe_softmax.default, aten.special_softmax.default),
    ),
    "log_softmax": (
        *(aten._log_softmax.default, aten.log_softmax.int, aten.special_log_softmax.default),
    ),
    "exp": (aten.exp.default, aten.exp_.default, *_BASES),
    "sum": (aten.sum.dim_IntList,),
    "add": SUMS,
    "multiply": MULTIPLICATIONS,
    "divide": QUOTIENTS,
}
