"""Attention written by hand: from a softmax back to the product of query and key.

A ``Handwritten`` listens to a ``Tracer``: ``Tracer(model, {**handwritten.listeners, ...},
otherwise=handwritten.pass_on)``. When a softmax has run whose scores come from the product of two
activations, it calls ``take(name, matrix)``, inside ``apart()``, once its weights have met the
value; where an attention was seen and cannot be told, ``refuse(name, reason)``, one sentence with
the user's file and line. Scores that meet a value without a softmax are noted in ``Absence``.

Nothing that does not come from a product of two activations is looked at, and what is known of it
is kept by storage, weakly (``tracks.py``). A softmax is an attention that cannot be told only where
its weights are multiplied with a value.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from regard.capture.contractions import PRODUCTS, Mark, Written, contraction, written
from regard.capture.element_axes import Axes
from regard.capture.part_gathering import Gathering
from regard.capture.recorded_values import TakeValue
from regard.capture.score_chain import Plus, Step, Times
from regard.capture.score_operations import COPIES
from regard.capture.softmax_forms import Softmaxes
from regard.capture.tensor_tracks import (
    Exponentials,
    Lost,
    Outcome,
    Parts,
    Scores,
    Track,
    Tracks,
    Weights,
    modules_of,
    storage_key,
)
from regard.capture.unseen_attention import Absence
from regard.capture.weight_changes import Changes
from regard.capture.weight_integrity import sums_to_one
from regard.capture.weight_mixing import (
    joined_words,
    other_axis_words,
    other_rows_words,
    relaid_words,
    tensors_in,
)
from regard.capture.weight_order import is_relaid, keys_met
from regard.matrix.attention_matrix import AttentionMatrix
from regard.tracing.tracer import Listener, Operation, apart, module_names

__all__ = ["Handwritten"]


class Handwritten:
    """Finds attention that is written as products and a softmax.

    Args:
        model: whose parameters are no activations.
        take: called with the module's name and the matrix of the model's own tensors; gives what
            the value is to be given to, None where it is not wanted.
        refuse: called with the module's name and the reason why its attention cannot be told.
        doubt: likewise, with the mark of a product where it may be none: once the product's own
            softmax has met a value, what was pooled of it is taken for features.
        absence: is told what else might have been attention.
    """

    def __init__(
        self,
        model: nn.Module,
        take: Callable[[str, AttentionMatrix], TakeValue | None],
        refuse: Callable[[str, str], None],
        doubt: Callable[[str, str, Mark], None],
        absence: Absence,
    ) -> None:
        self._refuse, self._doubt = refuse, doubt
        self._absence = absence
        self._short: dict[Outcome, tuple[str, str]] = {}
        self._buffers = model.buffers
        names = module_names(model)  # of those that can only be a function written as a module
        self._bare = {name for name, module in names.items() if _is_bare(module)}
        self._tracks = Tracks(model)
        self._changes = Changes(self._tracks)
        self._gathering = Gathering(self._tracks)
        self._softmaxes = Softmaxes(self._tracks, self._changes, self._gathering, take, refuse)

    @property
    def listeners(self) -> Mapping[Callable[..., Any], Listener]:
        """Who is to be told of which operation."""
        on_scores, on_copies = cache(self._on_scores), cache(self._on_copies)
        known = {func: on_scores(each) for func, each in self._softmaxes.listeners.items()}
        copies = {func: on_copies(known[func]) for func in COPIES}
        return {**known, **copies, **dict.fromkeys(PRODUCTS, self._product)}

    def _on_scores(self, listener: Listener) -> Listener:
        """A listener that has nothing to do before there are scores, and finds them whole."""

        def tell(operation: Operation) -> None:
            if self._tracks:
                self._gathering.settle(operation)
                listener(operation)

        return tell

    def _on_copies(self, listener: Listener) -> Listener:
        """A listener that takes note of the copies of parameters, too."""

        def tell(operation: Operation) -> None:
            if self._tracks.is_parameter(operation.args[0]):
                self._tracks.note_copy(operation.output)
            else:
                listener(operation)

        return tell

    def pass_on(self, operation: Operation) -> None:
        """Take note of an operation that none of the listeners knows."""
        if self._tracks:
            self._gathering.settle(operation)
        self._changes.pass_on(operation)

    def close(self) -> None:
        """Take what was found and has met no value yet."""
        self._softmaxes.release()

    def end(self) -> None:
        """Tell of what was found that is not what has met a value: the block has ended."""
        self.close()
        for name, reason in (*self._short.values(), *self._changes.unmet()):
            self._refuse(name, reason)
        self._short.clear()

    def _product(self, operation: Operation) -> None:
        """A product: of two activations, of weights and value, or with a parameter."""
        self._gathering.settle(operation)
        for tensor in tensors_in(operation.args):
            if isinstance(stage := self._tracks.stage_of(tensor), Weights):
                stage.settle()
        self._softmaxes.release()
        self._tracks.forget()
        self._absence.note_product(operation)
        output = cast(Tensor, operation.output)
        owned = any(self._tracks.is_parameter(tensor) for tensor in tensors_in(operation.args))
        if (owned and not self._tracks) or output.is_nested or not output.numel():
            return
        product = written(operation.func, operation.args, operation.kwargs)
        if product is None or self._meets_value(operation, product, output):
            return
        if owned:
            self.pass_on(operation)
            return
        with apart():
            found = contraction(product.left, product.right, product.labels)
        if found is None:
            return
        found[0].modules = operation.running()
        axes = Axes.of(output, found[1])
        steps: tuple[Step, ...] = ()
        if product.alpha != 1:
            steps = (Times(product.alpha, axes),)
        if product.added is not None and product.beta:
            steps = (*steps, Plus(product.added, axes, product.beta))
        self._tracks.put(output, axes, Scores(found[0], steps))

    def _meets_value(self, operation: Operation, product: Written, output: Tensor) -> bool:
        """Whether one of the factors is weights, or what becomes weights when it is divided."""
        summed = product.labels.summed
        sides = ((product.left, product.labels.left), (product.right, product.labels.right))
        for tensor, letters in sides:
            track = self._tracks.of(tensor)
            if track is not None and isinstance(track.stage, Weights):
                if self._mixes(track, track.stage, tensor, letters, product):
                    self._changes.mix(operation, tensor)
                    return True
                self._check(operation, track, track.stage, tensor, letters, summed)
                if not track.stage.settle() and track.stage.name is not None:
                    self._refuse(track.stage.name, other_rows_words(track.stage.line))
                if track.stage.trouble is None:
                    track.stage.meet()
                    _give_value(track, track.stage, tensor, product)
                return True
            if track is not None and isinstance(track.stage, Parts) and track.stage.weights:
                self._check_parts(track.stage, track.stage.weights, tensor, letters, summed)
                return True
            if track is not None and isinstance(track.stage, Exponentials) and len(summed) == 1:
                self._softmaxes.draw(tensor, letters.index(summed), output)
                self._suspect(operation, product, "exp is divided by no sum over the same keys")
                return True
        stage = self._tracks.stage_of(product.left)
        if isinstance(stage, Lost):
            self._suspect(operation, product, f"{stage.through} stands in its place")
        elif isinstance(stage, Scores) and (stage.steps or stage.product.is_of_vectors):
            self._suspect(operation, product, "nothing stands in its place")
        return False

    def _check_parts(
        self, parts: Parts, weights: Weights, tensor: Tensor, letters: str, summed: str
    ) -> None:
        """Weights that were put together of several softmaxes are multiplied with a value."""
        sound = len(summed) == 1 and self._gathering.holds_softmaxes(
            parts, tensor, letters.index(summed)
        )
        if not sound and weights.name is not None:
            self._refuse(weights.name, joined_words(parts.through, weights.line))

    def _mixes(
        self, track: Track, weights: Weights, tensor: Tensor, letters: str, product: Written
    ) -> bool:
        """Whether a product of weights makes others of them: with weights, or over their heads."""
        if weights.trouble is not None:
            return False
        other = product.right if tensor is product.left else product.left
        if isinstance(self._tracks.stage_of(other), Weights):
            return True
        if weights.meeting is None:
            return False
        matrix = weights.meeting.axes
        pairs = zip(matrix.sizes[:-2], matrix.places[:-2], strict=True)
        heads = {place for size, place in pairs if size > 1}
        summed = [_place_along(track, tensor, letters.index(a)) for a in product.labels.summed]
        return bool(summed) and heads.issuperset(summed)

    def _suspect(self, operation: Operation, product: Written, instead: str) -> None:
        """Scores, on the left, meet a value without a softmax."""
        stage = self._tracks.stage_of(product.left)
        name, before = operation.module(), modules_of(stage)
        owner = self._owner(operation, before)
        if name is None or (isinstance(stage, Lost) and before and owner is None):
            return  # where others run, they are features by now that have gone through the model
        known = {storage_key(buffer) for buffer in self._buffers()}
        factors = [product.left, product.right]
        if isinstance(stage, Scores):
            factors += [stage.product.left, stage.product.right]
        if not any(self._tracks.is_parameter(t) or storage_key(t) in known for t in factors):
            how = f"scores meet a value ({operation.place()}) without a softmax; {instead}"
            self._absence.note_unlike(owner or name, how)

    def _owner(self, operation: Operation, before: Collection[str]) -> str | None:
        """Which module runs a product and ran one before; a product may be a module of its own."""
        for name in operation.running():
            if name in before:
                return name
            if name not in self._bare:
                break
        return None

    def _check(
        self,
        operation: Operation,
        track: Track,
        weights: Weights,
        tensor: Tensor,
        letters: str,
        summed: str,
    ) -> None:
        """Weights are multiplied with a value, along an axis that must be the keys'."""
        if weights.name is None:
            return
        if weights.trouble is not None:
            if weights.pooled is None:
                self._refuse(weights.name, weights.trouble)
            else:
                self._doubt(weights.name, weights.trouble, weights.pooled)
            return
        if len(summed) != 1 or not weights.normal:
            return
        axis = letters.index(summed)
        line = _line_along(track, tensor, axis)
        if line is None:
            return
        if line.sizes[0] > 1 and not 0 < line.places[0] // weights.normal < weights.length:
            self._refuse(weights.name, other_axis_words(weights.line))
        elif self._is_in_order(operation, track, weights, tensor) and not (
            weights.meeting is None or tensor.shape[axis] == weights.length
        ):
            with apart():
                whole = sums_to_one(tensor, axis)
            if not whole:
                self._note_keys(operation, weights, line, weights.meeting.axes)

    def _is_in_order(
        self, operation: Operation, track: Track, weights: Weights, tensor: Tensor
    ) -> bool:
        """Whether weights meet their value as they lay, each once; refused where they do not."""
        if track.axes is None or weights.meeting is None or weights.name is None:
            return True
        matrix, seen = weights.meeting.axes, track.axes.seen_as(tensor)
        if seen is None:  # axes are merged, for which it was laid out as the whole that is met
            seen = track.axes if tensor.numel() == math.prod(track.axes.sizes) else matrix
        if is_relaid(seen, matrix):
            self._refuse(weights.name, relaid_words(operation, weights.line))
            return False
        return True

    def _note_keys(self, operation: Operation, weights: Weights, line: Axes, matrix: Axes) -> None:
        """Some keys of weights meet their value; the others must do so in other products."""
        outcome = weights.outcome
        shown, there = keys_met(line, matrix, weights.normal, weights.length)
        outcome.shown |= shown
        if there & ~outcome.shown:
            words = relaid_words(operation, weights.line, leaves_out=True)
            self._short[outcome] = cast(str, weights.name), words
        else:
            self._short.pop(outcome, None)


def _is_bare(module: nn.Module) -> bool:
    """Whether a module has neither parameters nor modules."""
    return next(module.parameters(), None) is None and next(module.children(), None) is None


def _place_along(track: Track, tensor: Tensor, axis: int) -> int | None:
    """How far one step along an axis goes in what the softmax gave; None where nobody can tell."""
    line = _line_along(track, tensor, axis)
    return None if line is None else line.places[0]


def _line_along(track: Track, tensor: Tensor, axis: int) -> Axes | None:
    """The first line of a tensor along an axis; None where nobody can tell where it lies."""
    if track.axes is None or not tensor.numel():
        return None
    # The other axes may be merged, so that the tensor as a whole has no strides there.
    with apart():
        line = tensor[tuple(slice(None) if i == axis else 0 for i in range(tensor.ndim))]
    return track.axes.seen_as(line)


def _give_value(track: Track, weights: Weights, tensor: Tensor, product: Written) -> None:
    """Weights meet their value, which is given to whoever wants it; it is told once."""
    meeting = weights.meeting
    axes = None if track.axes is None else track.axes.seen_as(tensor)
    if meeting is None or meeting.take is None or axes is None:
        return
    take, meeting.take = meeting.take, None
    with apart():
        value = meeting.value(axes, product, weights_are_left=tensor is product.left)
        if value is not None:
            take(value)
