"""Attention written by hand: from a softmax back to the product of query and key.

A ``Handwritten`` listens to a ``Tracer``: ``Tracer(model, {**handwritten.listeners, ...},
otherwise=handwritten.pass_on)``. When a softmax has run whose scores come from the product of two
activations, it calls ``take(name, matrix)``, inside ``apart()``; where an attention was seen and
cannot be told, ``refuse(name, reason)``, one sentence with the user's file and line.

Nothing that does not come from a product of two activations is looked at, and what is known of it
is kept by storage, weakly (``tracks.py``). A softmax is an attention that cannot be told only where
its weights are multiplied with a value.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from regard.capture.axes import Axes, contiguous
from regard.capture.contractions import PRODUCTS, contraction, written
from regard.capture.gates import is_gated
from regard.capture.layouts import Untold
from regard.capture.score_steps import (
    Fill,
    Plus,
    Sink,
    Step,
    Tanh,
    Times,
    Zeros,
    attention,
)
from regard.capture.tracks import (
    Exponentials,
    Lost,
    Scores,
    Stage,
    Totals,
    Track,
    Tracks,
    Weights,
)
from regard.matrix import AttentionMatrix
from regard.tracing import Caller, Listener, Operation, apart

__all__ = ["Handwritten"]


class Handwritten:
    """Finds attention that is written as products and a softmax.

    Args:
        model: whose parameters are no activations.
        take: called with the module's name and the matrix of the model's own tensors.
        refuse: called with the module's name and the reason why its attention cannot be told.
    """

    def __init__(
        self,
        model: nn.Module,
        take: Callable[[str, AttentionMatrix], None],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._take = take
        self._refuse = refuse
        self._tracks = Tracks(model)

    @property
    def listeners(self) -> Mapping[Callable[..., Any], Listener]:
        """Who is to be told of which operation."""
        return {
            operation: getattr(self, f"_{kind}")
            for kind, operations in _OPERATIONS.items()
            for operation in operations
        }

    def pass_on(self, operation: Operation) -> None:
        """Take note of an operation that none of the listeners knows."""
        if not self._tracks:
            return
        output = operation.output
        if isinstance(output, tuple) and output:
            output = cast(object, output[0])
        if not isinstance(output, Tensor) or output.is_nested:
            return
        for source in _tensors(operation.args):
            track = self._tracks.of(source)
            if track is None:
                continue
            if track.lies_in(output):
                if not _mutable(operation):
                    return
            elif output.numel() != source.numel():
                continue
            if isinstance(track.stage, Weights | Lost):
                stage = track.stage
                if isinstance(stage, Weights) and stage.trouble is None:
                    stage = self._after(operation, stage, source, output)
                self._tracks.put(output, self._axes_after(track, source, output), stage)
            elif not isinstance(track.stage, Totals):
                self._lose(operation)
            return

    def _product(self, operation: Operation) -> None:
        """A product: of two activations, of weights and value, or with a parameter."""
        self._tracks.forget()
        output = cast(Tensor, operation.output)
        owned = any(self._tracks.is_parameter(tensor) for tensor in _tensors(operation.args))
        if (owned and not self._tracks) or output.is_nested:
            return
        product = written(operation.func, operation.args, operation.kwargs)
        if product is None:
            return
        sides = ((product.left, product.labels.left), (product.right, product.labels.right))
        for tensor, letters in sides:
            track = self._tracks.of(tensor)
            if track is not None and isinstance(track.stage, Weights):
                self._meet_value(track, track.stage, tensor, letters, product.labels.summed)
                return
        if owned:
            self.pass_on(operation)
            return
        with apart():
            found = contraction(product.left, product.right, product.labels)
        if found is None:
            return
        axes = Axes.of(output, found[1])
        steps: tuple[Step, ...] = ()
        if product.alpha != 1:
            steps = (Times(product.alpha, axes),)
        if product.added is not None and product.beta:
            steps = (*steps, Plus(product.added, axes, product.beta))
        self._tracks.put(output, axes, Scores(found[0], steps))

    def _after(
        self, operation: Operation, weights: Weights, source: Tensor, output: Tensor
    ) -> Weights:
        """Weights on which one more operation has run, which may make them others."""
        # What was changed in place cannot be compared any more.
        alike = source.shape == output.shape and source.dtype == output.dtype
        if not alike or source.data_ptr() == output.data_ptr() or not output.is_floating_point():
            return weights
        with apart():
            if not is_gated(source, output):
                return weights
        caller = operation.caller()
        name = str(operation.func).split(".")[1]
        return replace(
            weights,
            trouble=f"{name} ({caller.file}:{caller.line}) changes the weights after their softmax "
            f"({weights.line}); what meets the value is no softmax of the scores.\n"
            "    Mask the scores before the softmax, with -inf.",
        )

    def _meet_value(
        self, track: Track, weights: Weights, tensor: Tensor, letters: str, summed: str
    ) -> None:
        """Weights are multiplied with a value, along an axis that must be the keys'."""
        if weights.name is None:
            return
        if weights.trouble is not None:
            self._refuse(weights.name, weights.trouble)
            return
        axes = None if track.axes is None else track.axes.seen_as(tensor)
        if axes is None or len(summed) != 1 or not weights.normal:
            return
        axis = letters.index(summed)
        along = axes.places[axis] // weights.normal
        if axes.sizes[axis] > 1 and not 0 < along < weights.length:
            self._refuse(
                weights.name,
                f"the softmax ({weights.line}) runs over another axis than the one along which its "
                "weights meet the value; the weights of a query must sum to 1 over the keys.\n"
                "    Take the softmax over the axis of the keys, dim=-1.",
            )

    def _softmax(self, operation: Operation) -> None:
        source, dim = operation.args[:2]
        track = self._tracks.of(source)
        if track is not None and isinstance(track.stage, Scores):
            axes = None if track.axes is None else track.axes.seen_as(source)
            self._normalise(operation, track.stage, axes, dim % source.ndim)
        elif track is not None and isinstance(track.stage, Lost):
            self._put_weights(operation, dim % source.ndim, track.stage.reason)

    def _normalise(self, operation: Operation, scores: Scores, axes: Axes | None, dim: int) -> None:
        """Weights follow from scores: the attention is known."""
        output = cast(Tensor, operation.output)
        caller = operation.caller()
        trouble = None
        self._tracks.spend(scores.product)
        if caller.module is not None:
            try:
                with apart():
                    if axes is None:
                        raise Untold("is taken of a part of the scores that cannot be told.")
                    given = operation.inputs() if output.ndim == 3 else []
                    matrix = attention(scores.product, scores.steps, axes, dim, output, given)
                    self._take(caller.module, matrix)
            except Untold as cause:
                trouble = f"the softmax ({caller.file}:{caller.line}) {cause}"
            except (TypeError, ValueError, RuntimeError, MemoryError) as cause:
                trouble = str(cause)
        self._put_weights(operation, dim, trouble, caller)

    def _put_weights(
        self, operation: Operation, dim: int, trouble: str | None, caller: Caller | None = None
    ) -> None:
        output = cast(Tensor, operation.output)
        caller = caller or operation.caller()
        places = contiguous(output.shape)
        normal = places[dim] if output.shape[dim] > 1 else 0
        line = f"{caller.file}:{caller.line}"
        weights = Weights(normal, output.shape[dim], caller.module, line, trouble)
        self._tracks.put(output, Axes.of(output, places), weights)

    def _exp(self, operation: Operation) -> None:
        source = operation.args[0]
        track = self._tracks.of(source)
        if track is None or track.axes is None or not isinstance(track.stage, Scores):
            self.pass_on(operation)
            return
        self._go_on(operation, source, track, Exponentials(track.stage))

    def _sum(self, operation: Operation) -> None:
        source, dims = operation.args[:2]
        track = self._tracks.of(source)
        if track is not None and isinstance(track.stage, Exponentials) and len(dims) == 1:
            scores = track.stage.scores
            self._tracks.put(operation.output, None, Totals(scores, dims[0] % source.ndim))

    def _divide(self, operation: Operation) -> None:
        source, by = operation.args[:2]
        track, of = self._tracks.of(source), self._tracks.of(by)
        if track is not None and of is not None:
            exponentials, totals = track.stage, of.stage
            if isinstance(exponentials, Exponentials) and isinstance(totals, Totals):
                axes = None if track.axes is None else track.axes.seen_as(source)
                if exponentials.scores is totals.scores:
                    self._normalise(operation, totals.scores, axes, totals.dim)
                    return
        self._extend(operation, source, lambda axes: Times(by, axes, divides=True))

    def _multiply(self, operation: Operation) -> None:
        source, by = operation.args[:2]
        if self._tracks.scores_of(source) is None:
            source, by = by, source
        self._extend(operation, source, lambda axes: Times(by, axes))

    def _negate(self, operation: Operation) -> None:
        self._extend(operation, operation.args[0], lambda axes: Times(-1.0, axes))

    def _add(self, operation: Operation) -> None:
        source, other = operation.args[:2]
        factor = float(operation.kwargs.get("alpha", 1))
        if self._tracks.scores_of(source) is None:
            self._extend(operation, other, lambda a: Times(factor, a), lambda a: Plus(source, a))
        else:
            self._extend(operation, source, lambda a: Plus(other, a, factor))

    def _subtract(self, operation: Operation) -> None:
        source, other = operation.args[:2]
        factor = -float(operation.kwargs.get("alpha", 1))
        if self._tracks.scores_of(source) is None:
            self._extend(operation, other, lambda a: Times(factor, a), lambda a: Plus(source, a))
        else:
            self._extend(operation, source, lambda a: Plus(other, a, factor))

    def _tanh(self, operation: Operation) -> None:
        self._extend(operation, operation.args[0], Tanh)

    def _masked_fill(self, operation: Operation) -> None:
        source, where, value = operation.args[:3]
        self._fill(operation, source, where, value)

    def _where(self, operation: Operation) -> None:
        where, chosen, other = operation.args[:3]
        if self._tracks.scores_of(chosen) is None:
            self._fill(operation, other, where, chosen)
        else:
            self._fill(operation, chosen, where, other, inverted=True)

    def _index_put(self, operation: Operation) -> None:
        source, indices, value = operation.args[:3]
        if len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.bool:
            self.pass_on(operation)
            return
        where = indices[0]
        with apart():
            where = where.reshape(*where.shape, *(1,) * (source.ndim - where.ndim))
        self._fill(operation, source, where, value)

    def _fill(
        self,
        operation: Operation,
        source: Any,
        where: Tensor,
        value: Any,
        *,
        inverted: bool = False,
    ) -> None:
        if self._tracks.scores_of(source) is None:
            self.pass_on(operation)
            return
        with apart():
            number = _one_number(value)
        if number is None:
            self._lose(operation)
        else:
            self._extend(operation, source, lambda axes: Fill(where, axes, number, inverted))

    def _triangle(self, operation: Operation) -> None:
        source = operation.args[0]
        if self._tracks.scores_of(source) is None:
            self.pass_on(operation)
            return
        with apart():
            kept = torch.ones(source.shape[-2:], dtype=torch.bool, device=source.device)
            diagonal = operation.args[1] if len(operation.args) > 1 else 0
            lower = operation.func in _OPERATIONS["triangle"][:2]
            kept = kept.tril(diagonal) if lower else kept.triu(diagonal)
        self._extend(operation, source, lambda axes: Zeros(kept, axes))

    def _bound(self, operation: Operation) -> None:
        """Bounds far beyond any score change nothing that the softmax takes notice of."""
        source, *bounds = (*operation.args, *operation.kwargs.values())
        numbers = [_one_number(bound) for bound in bounds if bound is not None]
        if self._tracks.scores_of(source) is None or None in numbers:
            self.pass_on(operation)
        elif all(abs(cast(float, number)) >= _BEYOND_SCORES for number in numbers):
            self._copy(operation)
        else:
            self._lose(operation)

    def _cat(self, operation: Operation) -> None:
        tensors = cast(list[Tensor], operation.args[0])
        output = cast(Tensor, operation.output)
        dim: int = (operation.args[1] if len(operation.args) > 1 else 0) % output.ndim
        at = [i for i, t in enumerate(tensors) if self._tracks.scores_of(t) is not None]
        if not at:
            self.pass_on(operation)
            return
        source, other = tensors[at[0]], tensors[1 - at[0]] if len(tensors) == 2 else None
        track = cast(Track, self._tracks.of(source))
        axes = None if track.axes is None else track.axes.seen_as(source)
        if other is None or other.ndim != source.ndim or len(at) > 1 or axes is None:
            self._lose(operation)
            return
        if other.shape[dim] != 1:
            self._lose(operation)
            return
        before = at[0] == 1
        start = axes.start - (axes.places[dim] if before else 0)
        scores = cast(Scores, track.stage)
        steps = (*scores.steps, Sink(other, axes, before))
        self._tracks.put(output, Axes.of(output, axes.places, start), replace(scores, steps=steps))

    def _copy(self, operation: Operation) -> None:
        """A copy, of another dtype or in another shape."""
        source, output = operation.args[0], operation.output
        if self._tracks.is_parameter(source):
            self._tracks.note_copy(output)
            return
        track = self._tracks.of(source)
        if track is not None and not track.lies_in(output):
            self._go_on(operation, source, track, track.stage)

    def _copy_into(self, operation: Operation) -> None:
        source = operation.args[1]
        track = self._tracks.of(source)
        if track is None or track.axes is None:
            self.pass_on(operation)
        else:
            self._go_on(operation, source, track, track.stage)

    def _extend(self, operation: Operation, source: Any, *steps: Callable[[Axes], Step]) -> None:
        """Scores on which one more operation has run."""
        track = self._tracks.of(source)
        if track is None or track.axes is None or not isinstance(track.stage, Scores):
            self.pass_on(operation)
            return
        output = cast(Tensor, operation.output)
        seen = track.axes.seen_as(source)
        axes = None if seen is None else seen.moved(output)
        in_place = track.lies_in(output)
        part = math.prod(seen.sizes if seen else ()) != math.prod(track.axes.sizes)
        if axes is None or (in_place and part):
            self._lose(operation)
            return
        more = tuple(step(axes) for step in steps)
        scores = replace(track.stage, steps=(*track.stage.steps, *more))
        self._tracks.put(output, track.axes if in_place else axes, scores)

    def _go_on(self, operation: Operation, source: Tensor, track: Track, stage: Stage) -> None:
        """What a storage holds goes on in another one, element by element."""
        output = cast(Tensor, operation.output)
        seen = self._axes_after(track, source, output)
        if seen is None and isinstance(stage, Scores | Exponentials):
            self._lose(operation)
        else:
            self._tracks.put(output, seen, stage)

    def _axes_after(self, track: Track, source: Tensor, output: Tensor) -> Axes | None:
        seen = None if track.axes is None else track.axes.seen_as(source)
        return None if seen is None else seen.moved(output) or seen.reshaped(output)

    def _lose(self, operation: Operation) -> None:
        """Scores go through something that has no place in an AttentionMatrix."""
        caller = operation.caller()
        name = str(operation.func).split(".")[1]
        lost = Lost(
            f"{name} ({caller.file}:{caller.line}) stands between the product of query and key "
            "and its softmax, and is no scale, bias, softcap, mask or sink."
        )
        for output in _tensors((operation.output,)):
            self._tracks.put(output, None, lost)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(cast(Iterable[Any], argument))


def _mutable(operation: Operation) -> bool:
    """Whether an operation changes numbers in place, not only how they are seen."""
    func = operation.func
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags:
        return False
    return func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def _one_number(value: object) -> float | None:
    """The number that a value is everywhere; None where it is several."""
    if not isinstance(value, Tensor):
        return float(cast(float, value))
    first = value.flatten()[0] if value.numel() else None
    return float(first) if first is not None and bool((value == first).all()) else None


_BEYOND_SCORES = 1e4  # no score is as far from 0

aten = torch.ops.aten
_OPERATIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "product": PRODUCTS,
    "softmax": (
        *(aten._softmax.default, aten._softmax.out, aten.softmax.int, aten.softmax.int_out),
        aten._safe_softmax.default,
    ),
    "exp": (aten.exp.default, aten.exp_.default),
    "sum": (aten.sum.dim_IntList,),
    "add": (aten.add.Tensor, aten.add_.Tensor),
    "subtract": (
        *(aten.sub.Tensor, aten.sub_.Tensor, aten.subtract.Tensor, aten.subtract_.Tensor),
    ),
    "multiply": (
        *(aten.mul.Tensor, aten.mul_.Tensor, aten.multiply.Tensor, aten.multiply_.Tensor),
    ),
    "negate": (aten.neg.default, aten.neg_.default, aten.negative.default),
    "divide": (
        *(aten.div.Tensor, aten.div_.Tensor, aten.divide.Tensor, aten.divide_.Tensor),
        *(aten.true_divide.Tensor, aten.true_divide_.Tensor),
    ),
    "tanh": (aten.tanh.default, aten.tanh_.default),
    "masked_fill": (
        *(aten.masked_fill.Scalar, aten.masked_fill_.Scalar),
        *(aten.masked_fill.Tensor, aten.masked_fill_.Tensor),
    ),
    "where": (*(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf),),
    "index_put": (aten.index_put.default, aten.index_put_.default),
    "triangle": (aten.tril.default, aten.tril_.default, aten.triu.default, aten.triu_.default),
    "bound": (
        *(aten.clamp.default, aten.clamp_.default, aten.clamp_min.default, aten.maximum.default),
        *(aten.max.other, aten.nan_to_num.default),
    ),
    "cat": (aten.cat.default, aten.concat.default),
    "copy": (
        *(aten.clone.default, aten._to_copy.default, aten.contiguous.default, aten.reshape.default),
        *(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default),
        *(aten.flatten.using_ints, aten.lift_fresh_copy.default),
    ),
    "copy_into": (aten.copy_.default,),
}
