"""Detection of attention written by hand, from the product of query and key to the value.

    query · key ──► scale, bias, mask, softcap, sink ──► softmax ──► cast, dropout ──► · value
       Scores              Scores + steps                Weights        Weights        recorded

``Handwritten`` listens to a ``Tracer``. Only operations of the table in ``tracing/operations.py``
continue the chain. Any other operation ends it, and the refusal names the operation and its line.
An attention is recorded when all its weights are multiplied by a value. First, a few rows must show
that the recorded query, key, mask and bias give these weights (``proof.py``).
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.capture.contractions import Product, Written, broadcast_product, written
from regard.capture.element_axes import Axes, contiguous
from regard.capture.matrix_axes import Unsupported, WeightAxes
from regard.capture.merging import TakeValue
from regard.capture.proof import Sample
from regard.capture.provenance import (
    Attention,
    Exponentials,
    Lost,
    MergeOrder,
    Noise,
    Provenance,
    RowSums,
    Scores,
    Track,
    Weights,
    storage_key,
)
from regard.capture.refusals import Absence
from regard.capture.score_chain import Plus, Step, Times, attention_of_steps
from regard.capture.score_operations import STEPS, next_scores, with_sink
from regard.capture.weight_operations import (
    after_operation,
    change_of,
    place_of,
    tensors_in,
    without_rows,
    written_by,
)
from regard.matrix.attention_matrix import AttentionMatrix
from regard.tracing.operations import (
    CASTS,
    CHANCE,
    COPIES,
    COPY_INTO,
    DROPOUTS,
    EXPONENTIALS,
    JOINS,
    MULTIPLICATIONS,
    PRODUCTS,
    QUOTIENTS,
    ROW_SUMS,
    SHAPES_ALONE,
    SOFTMAXES,
)
from regard.tracing.tracer import Listener, Operation, apart

__all__ = ["Handwritten"]


class Handwritten:
    """A detector of attention that is written as products and a softmax.

    Args:
        model: the model; its parameters do not count as activations.
        take: called with the module's name and the matrix of the model's own tensors. It returns a
            function that receives the value, or None if the value is not recorded.
        refuse: called with the module's name, the reason and the line of the softmax.
        absence: collects operations that might have been attention.

    Attributes:
        listeners: the listeners of the operations that may begin a chain: products, and the copies
            and concatenations before them.
    """

    def __init__(
        self,
        model: nn.Module,
        take: Callable[[str, AttentionMatrix], TakeValue | None],
        refuse: Callable[[str, str, str], None],
        absence: Absence,
    ) -> None:
        self._take, self._refuse = take, refuse
        self._absence = absence
        self._buffers = model.buffers
        self._provenance = Provenance(model)
        self._merges = MergeOrder()
        self._pending: list[Attention] = []
        self.listeners: Mapping[Callable[..., Any], Listener] = {
            **dict.fromkeys(COPIES, self._copy),
            **dict.fromkeys(JOINS, self._join),
            **dict.fromkeys(PRODUCTS, self._product),
            **dict.fromkeys(MULTIPLICATIONS, self._multiply),
        }
        self._on_chain: Mapping[Callable[..., Any], Listener] = {
            **dict.fromkeys(STEPS, self._step),  # MULTIPLICATIONS have a listener already
            **dict.fromkeys(QUOTIENTS, self._divide),
            **dict.fromkeys(SOFTMAXES, self.on_softmax),
            **dict.fromkeys(EXPONENTIALS, self._exp),
            **dict.fromkeys(ROW_SUMS, self._sum),
            **dict.fromkeys(CHANCE, self._draw),
            **dict.fromkeys(DROPOUTS, self._drop),
            **dict.fromkeys(COPY_INTO, self._copy_into),
        }

    def listener_of(self, func: Callable[..., Any]) -> Listener | None:
        """Return the listener of an operation that ``listeners`` lacks.

        It is None while no scores or weights are tracked.
        """
        return self._on_chain.get(func, self.pass_on) if self._provenance else None

    def finish(self) -> None:
        """Refuse each attention whose weights were not multiplied by a value unchanged."""
        pending, self._pending = self._pending, []
        for each in pending:
            self._give_up(each)

    # Products of query and key, and of weights and value

    def _product(self, operation: Operation) -> None:
        self._forget()
        self._absence.note_product(operation)
        owned = any(self._provenance.is_parameter(tensor) for tensor in tensors_in(operation.args))
        output = cast(Tensor, operation.output)
        if (owned and not self._provenance) or output.is_nested or not output.numel():
            return
        with apart():
            product = written(operation.func, operation.args, operation.kwargs)
        if self._meets_value(operation, product):
            return
        if owned:
            self.pass_on(operation)
        else:
            self._score(operation, product)

    def _score(self, operation: Operation, product: Written) -> None:
        """Track a product of two activations as scores."""
        output = cast(Tensor, operation.output)
        axes = Axes.of(output, product.places)
        steps: tuple[Step, ...] = ()
        if product.alpha != 1:
            steps = (Times(product.alpha, axes),)
        if product.added is not None and product.beta:
            steps = (*steps, Plus(product.added, axes, product.beta))
        found = Product(product.left, product.right.mT, operation.running())
        self._provenance.put(output, axes, Scores(found, steps))

    def _multiply(self, operation: Operation) -> None:
        """Track an elementwise product: a step, dropout, or an einsum over an axis of size 1."""
        first, second = operation.args[:2]
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            for tensor, value in ((first, second), (second, first)):
                track = self._provenance.of(tensor)
                if track is None or not isinstance(track.stage, Weights):
                    continue
                if track.stage.attention.length == 1:
                    with apart():
                        product = broadcast_product(tensor, value)
                    if product is not None and product.right.shape[-1] > 1:
                        self._meet(operation, track, product.left, product.right)
                        return
            if _is_outer(first, second) and not any(map(self._provenance.of, (first, second))):
                with apart():
                    product = broadcast_product(first, second)
                if product is not None and not any(
                    map(self._provenance.is_parameter, (first, second))
                ):
                    self._score(operation, product)
                return
        if self._provenance:
            self._step(operation)

    def _meets_value(self, operation: Operation, product: Written) -> bool:
        """Handle a product of weights, or of exponentials that were not normalised.

        Return False if no factor is either of them. Scores that may meet a value without a softmax
        are reported, but count as an ordinary product.
        """
        for tensor, other in product.sides:
            track = self._provenance.of(tensor)
            if track is None or not isinstance(track.stage, Weights):
                continue
            if isinstance(self._provenance.stage_of(other), Weights):
                self._end_chain(operation, cast(Tensor, operation.output), track)
            elif track.stage.attention.trouble is None or not self._provenance.is_parameter(other):
                self._meet(operation, track, tensor, other, product.alpha)
            return True
        stage = self._provenance.stage_of(product.left)
        if isinstance(stage, Exponentials):
            self._suspect(operation, stage.scores, "exp is divided by no sum over the same keys")
            return True
        if self._provenance.is_parameter(product.right):
            return False
        if isinstance(stage, Lost):
            self._suspect(operation, stage, f"{stage.through} stands in its place")
        elif isinstance(stage, Scores) and (stage.steps or stage.product.is_of_vectors):
            self._suspect(operation, stage, "nothing stands in its place")
        return False

    def _suspect(self, operation: Operation, stage: Scores | Lost, instead: str) -> None:
        """Report scores that are multiplied by a value without a softmax in the same module."""
        modules = stage.modules if isinstance(stage, Lost) else stage.product.modules
        name, factors = operation.module(), tensors_in(operation.args)
        constants = {storage_key(buffer) for buffer in self._buffers()}
        if name in modules and not any(storage_key(each) in constants for each in factors):
            how = f"scores meet a value ({operation.place()}) without a softmax; {instead}"
            self._absence.note_unlike(name, how)

    # The value

    def _meet(
        self, operation: Operation, track: Track, tensor: Tensor, value: Tensor, alpha: float = 1.0
    ) -> None:
        """Record or refuse the attention of weights that are multiplied by a value.

        The weights are (batch, rows, keys), the value is (batch, keys, head_dim).
        """
        weights = cast(Weights, track.stage)
        attention = weights.attention
        if attention.name is None or attention.is_refused:
            return
        if attention.trouble is not None:
            self._refuse_attention(attention, attention.trouble)
            return
        seen = track.of_view(tensor)
        with apart():
            reason = _mismatch(operation, attention, seen, alpha)
            if reason is not None:
                attention.changed = attention.changed or reason
                return
            weight_axes = cast(WeightAxes, attention.weight_axes)
            used = cast(Axes, seen).arranged(tensor, weight_axes.axes)
            used = None if used is None else used.expand(weight_axes.axes.sizes)
            if used is None or not _is_proved(weights, used):
                self._refuse_attention(attention, _UNPROVED.format(attention.line))
                return
            empty_rows = weight_axes.empty_rows(used) if weights.may_have_empty_rows else None
            if not attention.is_recorded:
                self._record(weights, empty_rows, cast(Axes, seen), value)
            elif not _are_alike(attention.empty_rows, empty_rows):
                self._refuse_attention(attention, _TWO_ROWS.format(attention.line))

    def _record(
        self, weights: Weights, empty_rows: Tensor | None, seen: Axes, factor: Tensor
    ) -> None:
        attention = weights.attention
        whole = cast(AttentionMatrix, attention.matrix)
        matrix = without_rows(whole, empty_rows)
        if weights.is_dropped and matrix is not whole:
            self._refuse_attention(attention, _DROPPED_ROWS.format(attention.line))
            return
        attention.is_recorded, attention.empty_rows, attention.matrix = True, empty_rows, None
        self._pending = [each for each in self._pending if each is not attention]
        take_value = self._take(cast(str, attention.name), matrix)
        if take_value is not None:
            value = cast(WeightAxes, attention.weight_axes).value(seen, factor)
            if value is not None:
                take_value(value)

    def _refuse_attention(self, attention: Attention, reason: str) -> None:
        attention.is_refused, attention.matrix, attention.sample = True, None, None
        self._pending = [each for each in self._pending if each is not attention]
        if attention.name is not None and not attention.is_outer:
            self._refuse(attention.name, reason, attention.line)

    def _give_up(self, attention: Attention) -> None:
        """Refuse an attention whose weights can no longer be multiplied by a value."""
        self._refuse_attention(attention, attention.changed or _UNMET.format(attention.line))

    def _forget(self) -> None:
        """Remove freed storages, and refuse attentions whose weights were freed."""
        self._provenance.forget()
        if self._pending:
            stages = [track.stage for track in self._provenance]
            alive = {id(stage.attention) for stage in stages if isinstance(stage, Weights)}
            gone = [each for each in self._pending if id(each) not in alive]
            self._pending = [each for each in self._pending if id(each) in alive]
            for each in gone:
                self._give_up(each)

    # Softmax

    def on_softmax(self, operation: Operation) -> None:
        """Track the weights of a softmax of scores."""
        source, dim = operation.args[:2]
        track = self._provenance.of(source)
        if track is not None and isinstance(track.stage, Scores):
            seen = track.of_view(source)
            self._normalise(operation, track.stage, seen, dim % source.ndim, source)
        elif track is not None and isinstance(track.stage, Lost):
            reason = (
                f"{track.stage.through} stands between the product of query and key and its "
                "softmax, and is no scale, bias, softcap, mask or sink."
            )
            name = _owner(operation, track.stage.modules)
            attention = _attention(operation, name, dim % source.ndim, reason)
            self._put_weights(operation, attention)
        else:
            self.pass_on(operation)

    def _exp(self, operation: Operation) -> None:
        source = operation.args[0]
        track = self._provenance.of(source)
        seen = None if track is None else track.of_view(source)
        moved = None if seen is None else seen.moved(cast(Tensor, operation.output))
        if track is None or moved is None or not isinstance(track.stage, Scores):
            self.pass_on(operation)
        else:
            self._provenance.put(operation.output, moved, Exponentials(track.stage))

    def _sum(self, operation: Operation) -> None:
        source: Tensor = operation.args[0]
        dims = cast("list[int]", operation.args[1] or ())
        stage = self._provenance.stage_of(source)
        if isinstance(stage, Exponentials) and len(dims) == 1:
            sums = RowSums(stage.scores, dims[0] % source.ndim - source.ndim)
            self._provenance.put(operation.output, None, sums)
        else:
            self.pass_on(operation)

    def _divide(self, operation: Operation) -> None:
        source, by = operation.args[:2]
        track, sums = self._provenance.of(source), self._provenance.stage_of(by)
        if not (
            track is not None
            and isinstance(track.stage, Exponentials)
            and isinstance(sums, RowSums)
            and track.stage.scores is sums.scores
        ):
            self._step(operation)
            return
        seen = track.of_view(source)
        self._normalise(operation, sums.scores, seen, sums.dim % source.ndim, None)

    def _normalise(
        self,
        operation: Operation,
        scores: Scores,
        axes: Axes | None,
        dim: int,
        source: Tensor | None,
    ) -> None:
        """Track the weights of a softmax; they are recorded when they are multiplied by a value."""
        output = cast(Tensor, operation.output)
        name = _owner(operation, scores.product.modules)
        attention = _attention(operation, name, dim, None)
        attention.is_outer = scores.product.left.shape[-1] == 1
        if name is None:
            return
        try:
            with apart():
                if axes is None:
                    raise Unsupported("is taken of an unknown part of the scores.")
                inputs = operation.inputs() if len(axes.sizes) == 3 else []
                heads_first = self._merges.is_heads_first(scores.product)
                matrix, final = attention_of_steps(
                    scores.product, scores.steps, axes, dim, inputs, heads_first=heads_first
                )
                self._describe(attention, matrix, final, axes, output, scores, source)
        except Unsupported as cause:
            attention.trouble = f"the softmax ({attention.line}) {cause}"
        except (TypeError, ValueError, RuntimeError, MemoryError) as cause:
            attention.trouble = str(cause)
        if attention.trouble is None:
            self._pending.append(attention)
        self._put_weights(operation, attention)

    def _describe(
        self,
        attention: Attention,
        matrix: AttentionMatrix,
        final: Axes,
        axes: Axes,
        output: Tensor,
        scores: Scores,
        source: Tensor | None,
    ) -> None:
        """Set the matrix of an attention, the axes of its weights, and sampled rows."""
        moved = axes.moved(output)
        weight_axes = None if moved is None else WeightAxes.of(output, moved, final, matrix.ndim)
        whole = Axes.of(output, contiguous(output.shape))
        weights = None if weight_axes is None else whole.arranged(output, weight_axes.axes)
        if weight_axes is None or weights is None:
            raise Unsupported("is taken of an unknown part of the scores.")
        sizes = weight_axes.axes.sizes
        rows = None
        if source is not None:
            rows = whole.arranged(source, weight_axes.axes)
            rows = None if rows is None else rows.expand(sizes)
        dtypes = [matrix.dtype, output.dtype if source is None else source.dtype]
        dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        sample = Sample.of(rows, weights.expand(sizes), dtype, len(scores.steps))
        if not sample.is_of(matrix):
            raise Unsupported("gave other weights than follow from its query and key.")
        attention.matrix, attention.weight_axes, attention.sample = matrix, weight_axes, sample

    def _put_weights(self, operation: Operation, attention: Attention) -> None:
        output = cast(Tensor, operation.output)
        self._provenance.put(output, Axes.of(output, contiguous(output.shape)), Weights(attention))

    # Steps before and after the softmax

    def _step(self, operation: Operation) -> None:
        """Track an operation on scores, or on weights that it leaves unchanged."""
        for source in tensors_in(operation.args):
            track = self._provenance.of(source)
            if not source.numel():
                continue  # an empty view holds no scores or weights
            if track is not None and isinstance(track.stage, Scores):
                found = next_scores(operation, source, track, track.stage)
                if found is None:
                    self._lose(operation, track.stage, cast(Tensor, operation.output))
                else:
                    self._provenance.put(operation.output, found[1], found[0])
                return
            if track is not None and isinstance(track.stage, Weights):
                self._weigh(operation, source, track, track.stage)
                return
        self.pass_on(operation)

    def _weigh(self, operation: Operation, source: Tensor, track: Track, weights: Weights) -> None:
        """Track weights through an operation of the table that leaves them unchanged."""
        if not cast(Tensor, operation.output).is_floating_point():
            return
        others = [
            self._provenance.stage_of(t) for t in tensors_in(operation.args) if t is not source
        ]
        noisy = any(isinstance(stage, Noise) for stage in others)
        found = None
        if not any(isinstance(stage, Weights) for stage in others):
            with apart():
                found = after_operation(operation, source, track, weights, noisy=noisy)
        if found is None:
            self._end_chain(operation, operation.output, track)
        else:
            self._provenance.put(operation.output, found[1], found[0])

    def _draw(self, operation: Operation) -> None:
        """Track random numbers; in a storage that is tracked already they end its chain."""
        written_into = self._provenance.of(operation.output)
        if written_into is None:
            self._provenance.put(operation.output, None, Noise())
        else:
            self.pass_on(operation)

    def _drop(self, operation: Operation) -> None:
        """Track weights through a single dropout operation."""
        source = operation.args[0]
        track = self._provenance.of(source)
        output = next(tensors_in((operation.output,)))
        if track is not None and isinstance(track.stage, Weights):
            axes = track.axes if track.lies_in(output) else _axes_after(track, source, output)
            self._provenance.put(output, axes, replace(track.stage, is_dropped=True))
        else:
            self.pass_on(operation)

    def _copy(self, operation: Operation) -> None:
        """Track scores or weights into a copy, which may have another dtype or shape."""
        source, output = operation.args[0], operation.output
        if self._provenance.is_parameter(source):
            self._provenance.note_copy(output)
            return
        self._merges.note_copy(operation)
        track = self._provenance.of(source)
        if track is None or track.lies_in(output):
            return
        exact = output.is_floating_point() and (
            operation.func not in CASTS or output.dtype.itemsize > 1
        )
        axes = _axes_after(track, source, output)
        stage = track.stage
        if isinstance(stage, Weights) and exact:
            rounding = max(stage.rounding, torch.finfo(output.dtype).eps)
            self._provenance.put(output, axes, replace(stage, rounding=rounding))
        elif not exact or (axes is None and isinstance(stage, Scores | Exponentials)):
            self.pass_on(operation)
        else:
            self._provenance.put(output, axes, stage)

    def _copy_into(self, operation: Operation) -> None:
        """Track scores or weights that are copied into an existing tensor."""
        target, source = operation.args[:2]
        track, earlier = self._provenance.of(source), self._provenance.of(target)
        whole = target.nbytes == target.untyped_storage().nbytes()
        if track is None and earlier is not None:
            if isinstance(earlier.stage, Lost) and whole:
                self._provenance.drop(target)
            elif isinstance(earlier.stage, Scores | Weights) and not whole:
                self._step(operation)
            else:
                self.pass_on(operation)
        elif track is not None and whole and earlier is None:
            seen = track.of_view(source)
            moved = None if seen is None else seen.moved(target)
            if moved is not None and isinstance(track.stage, Scores | Exponentials | Weights):
                self._provenance.put(target, moved, track.stage)
            else:
                self.pass_on(operation)
        elif track is not None and (found := self._added_to_a_part(target, source, track, earlier)):
            self._provenance.put(target, found[1], found[0])
        elif track is not None:
            for each in (track, earlier):
                if each is not None:
                    self._end_chain(operation, target, each)

    def _added_to_a_part(
        self, target: Tensor, source: Tensor, track: Track, earlier: Track | None
    ) -> tuple[Scores, Axes] | None:
        """Return scores after a bias was added to a part of them; None for any other change.

        MViT adds a bias to all tokens but the class token.
        """
        before, after = None if earlier is None else earlier.stage, track.stage
        if earlier is None or earlier.axes is None or not isinstance(before, Scores):
            return None
        if not isinstance(after, Scores) or after.product is not before.product:
            return None
        target_axes, source_axes = earlier.of_view(target), track.of_view(source)
        if target_axes is None or source_axes is None:
            return None
        if (target_axes.places, target_axes.start) != (source_axes.places, source_axes.start):
            return None
        more = after.steps[len(before.steps) :]
        if after.steps[: len(before.steps)] != before.steps:
            return None
        with apart():
            added = target.new_zeros(target.untyped_storage().nbytes() // target.element_size())
            part = added.as_strided(target.shape, target.stride(), target.storage_offset())
            for step in more:
                if not isinstance(step, Plus) or not isinstance(step.numbers, Tensor):
                    return None
                spread = step.numbers.expand(step.axes.sizes).contiguous()
                numbers = step.axes.arranged(spread, target_axes)
                if numbers is None:
                    return None
                part += step.factor * numbers
            whole = added.as_strided(earlier.axes.sizes, earlier.axes.strides, earlier.axes.offset)
        return replace(before, steps=(*before.steps, Plus(whole, earlier.axes))), earlier.axes

    def _join(self, operation: Operation) -> None:
        """Track scores that get a sink column; end the chain of any other concatenation."""
        self._merges.note_join(operation)
        if not self._provenance:
            return
        tensors = list(tensors_in(operation.args))
        tracks = [self._provenance.of(each) for each in tensors]
        stages = [None if track is None else track.stage for track in tracks]
        if isinstance(operation.args[0], list | tuple):
            scores = [each if isinstance(each, Scores) else None for each in stages]
            found = with_sink(operation, scores, tracks)
            if found is not None and not any(isinstance(s, Lost | Weights) for s in stages):
                self._provenance.put(operation.output, found[1], found[0])
                return
        self.pass_on(operation)

    # The end of a chain

    def pass_on(self, operation: Operation) -> None:
        """End the chain of scores and weights that an unsupported operation uses."""
        if not self._provenance or operation.func in SHAPES_ALONE:
            return
        written_in = list(written_by(operation))
        for tensor in written_in:
            track = self._provenance.of(tensor)
            if track is not None and tensor.numel():
                self._end_chain(operation, tensor, track)
        for source in tensors_in((operation.args, *operation.kwargs.values())):
            track = self._provenance.of(source)
            if track is None or any(tensor is source for tensor in written_in):
                continue
            for output in tensors_in((operation.output,)):
                if not track.lies_in(output) and self._may_hold(operation, track, source, output):
                    self._end_chain(operation, output, track)

    def _may_hold(self, operation: Operation, track: Track, source: Tensor, output: Tensor) -> bool:
        """Return True if the output of an unsupported operation may still be scores or weights."""
        if isinstance(track.stage, Noise):
            return output.numel() == source.numel() and self._provenance.of(output) is None
        numbers = output.is_sparse or output.is_floating_point() or output.is_complex()
        if not numbers or isinstance(self._provenance.stage_of(output), Weights):
            return False
        if output.numel() == source.numel() or isinstance(track.stage, Weights):
            return True
        if output.numel() == 1 or any(
            map(self._provenance.is_parameter, tensors_in(operation.args))
        ):
            return False  # the output of a layer with parameters is features, not scores
        return all(output.numel() * size != source.numel() for size in source.shape[-2:])

    def _end_chain(self, operation: Operation, tensor: Tensor, track: Track) -> None:
        """Record that an operation changed scores or weights, with its result in ``tensor``."""
        stage = track.stage
        if isinstance(stage, Weights):
            attention = stage.attention
            attention.changed = attention.changed or change_of(operation, attention.line)
            if attention.trouble is not None and (
                operation.func in JOINS or _has_size(track, tensor)
            ):
                self._provenance.put(tensor, None, stage)
            elif track.lies_in(tensor):
                self._provenance.drop(tensor)
        elif isinstance(stage, Lost | Noise):
            self._provenance.put(tensor, None, stage)
        elif isinstance(stage, Scores | Exponentials):
            self._lose(operation, stage, tensor)
        elif track.lies_in(tensor):
            self._provenance.drop(tensor)

    def _lose(self, operation: Operation, stage: Scores | Exponentials, output: Tensor) -> None:
        """Track the output of an operation on scores that a matrix cannot represent."""
        scores = stage.scores if isinstance(stage, Exponentials) else stage
        if scores.product.left.shape[-1] == 1:
            self._provenance.drop(output)  # an outer product, such as positions times frequencies
        else:
            self._provenance.put(output, None, Lost(place_of(operation), scores.product.modules))


def _attention(operation: Operation, name: str | None, dim: int, trouble: str | None) -> Attention:
    output = cast(Tensor, operation.output)
    place = contiguous(output.shape)[dim] if output.shape[dim] > 1 else 0
    return Attention(name, operation.place(), place, output.shape[dim], trouble)


def _mismatch(
    operation: Operation, attention: Attention, seen: Axes | None, alpha: float
) -> str | None:
    """Return why a product is not ``weights @ value`` over all keys; None if it is.

    ``seen`` are the axes of the weights, (batch, rows, keys); None if they cannot be determined.
    ``alpha`` is the factor of the product.
    """
    weight_axes = attention.weight_axes
    if seen is None or weight_axes is None:
        return change_of(operation, attention.line)
    if seen.sizes[-1] > 1 and not _is_along(seen, -1, attention):
        over_queries = seen.places[-1] == weight_axes.axes.places[-2]
        if over_queries:
            return _OTHER_AXIS.format(attention.line)
        return change_of(operation, attention.line)
    sides = zip(seen.sizes, seen.places, strict=True)
    if math.prod(size for size, place in sides if place) != math.prod(weight_axes.axes.sizes):
        return _PART.format(attention.line)
    is_of_batch = seen.sizes[0] == 1 or seen.places[0] in weight_axes.axes.places[:-2]
    return None if alpha == 1 and is_of_batch else change_of(operation, attention.line)


def _is_proved(weights: Weights, used: Tensor) -> bool:
    """Return True if sampled rows show that a tensor on the matrix's axes holds its weights."""
    attention = weights.attention
    if attention.sample is None or (
        attention.matrix is not None and not attention.sample.is_of(attention.matrix)
    ):
        return False
    return attention.sample.has_weights(used, weights.rounding, is_dropped=weights.is_dropped)


def _is_along(seen: Axes, axis: int, attention: Attention) -> bool:
    """Return True if an axis of the weights stays within the keys of one query."""
    step, rest = divmod(seen.places[axis], attention.place) if attention.place else (0, 0)
    if rest or step < 1:
        return False
    first = seen.start // attention.place % attention.length
    return first + step * (seen.sizes[axis] - 1) < attention.length


def _has_size(track: Track, tensor: Tensor) -> bool:
    """Return True if a tensor has as many elements as the tracked tensor, or that is unknown."""
    return track.axes is None or math.prod(track.axes.sizes) == tensor.numel()


def _are_alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _axes_after(track: Track, source: Tensor, output: Tensor) -> Axes | None:
    seen = track.of_view(source)
    return None if seen is None else seen.moved(output) or seen.reshaped(output)


def _is_outer(first: Tensor, second: Tensor) -> bool:
    """Return True if einsum may compute scores with ``mul`` because head_dim is 1."""
    if first.ndim != second.ndim or first.ndim < 3 or first.is_nested or second.is_nested:
        return False
    sizes = [*zip(first.shape, second.shape, strict=True)]
    rows, columns = sum(n > m == 1 for n, m in sizes), sum(m > n == 1 for n, m in sizes)
    return sizes[-1] == (1, 1) and rows == columns == 1


def _owner(operation: Operation, before: Collection[str]) -> str | None:
    """Return the innermost running module that also ran the product of query and key.

    This skips a ``nn.Softmax`` module, which several layers may share. If no running module ran
    the product, it is the innermost running module.
    """
    running = operation.running()
    both = (name for name in running if name in before)
    return next(both, next(iter(running), None))


_OTHER_AXIS = (
    "the softmax ({}) runs over another axis than the one along which its weights meet the value; "
    "the weights of a query must sum to 1 over the keys.\n"
    "    Take the softmax over the axis of the keys, dim=-1."
)
_TWO_ROWS = (
    "the softmax ({}) gives weights that are used twice, and rows of them were set to 0 for one of "
    "the two; a matrix has one of them.\n"
    "    Take the softmax twice, once for each."
)
_DROPPED_ROWS = (
    "the softmax ({}) gives weights of which rows were set to 0 and others dropped at random; the "
    "zeros do not show which.\n"
    "    Observe the model in eval() mode, without dropout."
)
_UNPROVED = (
    "the weights of the softmax ({}) are not what its query and key give when they meet the value; "
    "query, key, mask or weights were written to in between.\n"
    "    Change copies of them, or change them before the product of query and key."
)
_UNMET = (
    "the weights of the softmax ({}) met no value.\n"
    "    Multiply the weights that the softmax gave with the value, as weights @ value."
)
_PART = (
    "some of the weights of the softmax ({}) meet a value on their own, as in a loop over heads or "
    "blocks.\n"
    "    Multiply all weights with the value in one product, as weights @ value."
)
