"""Attention that is written by hand: the operand that multiplies the value.

    query · key ──► any operations ──► softmax ──► any operations ──► · value
      Product           scores          Softmax        weights        recorded

``MetValue`` listens to a ``Tracer``. It marks the storages whose numbers descend from a product of
two activations, whatever made them. A marked operand that multiplies another activation, is not
negative and has rows that sum to 1 (or to 0, without keys) is an attention. It is recorded as it
stands, in the model's own axes. ``evidence.py`` puts query and key in its place where they give
all of it. Dropout is the one step that is looked through.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from regard.capture.contractions import (
    Product,
    Written,
    broadcast_product,
    weighted_sum,
    written,
)
from regard.capture.dropout import Dropout, before_dropout
from regard.capture.element_axes import Axes, contiguous
from regard.capture.evidence import Evidence, explained
from regard.capture.fused_calls import NESTED
from regard.capture.gradients import alters_gradient
from regard.capture.refusals import Absence
from regard.capture.score_steps import Steps
from regard.capture.storages import Parameters, Storages, storage_key, tensors_in, written_by
from regard.capture.weight_tracks import (
    Geometry,
    Softmax,
    Track,
    apart_from_heads,
    are_dense_reals,
    axes_of_copy,
    evidence_of,
    geometry,
    grouped,
    has_one_key,
    is_like,
    is_of_scores,
    is_outer,
    is_over_heads,
    is_over_rows_of_parameter,
    lines_of,
    query_axis,
    rounding_of,
    shaped_value,
    shaped_weights,
    with_column,
)
from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.given_scores import GivenScores
from regard.tracing.operations import (
    ADDITIONS,
    CHANCE,
    COPIES,
    DISTANCES,
    DIVISIONS,
    DROPOUTS,
    EXPONENTIALS,
    GATHERS,
    MULTIPLICATIONS,
    NORMS,
    PRODUCTS,
    RECIPROCALS,
    SAMPLERS,
    SHAPES_ALONE,
    SOFTMAXES,
    SUMS,
    TERMS,
)
from regard.tracing.tracer import Listener, Operation, apart

_Factors = tuple[Tensor, Tensor, Geometry]
"""Weights and a value that were multiplied element by element, and the product's own view."""


@dataclass(frozen=True, eq=False)
class Met:
    """An attention that met its value, made of the model's own tensors.

    Attributes:
        name: the name of its module.
        weights: what multiplied the value, (..., q_len, kv_len), before dropout.
        value: (..., kv_len, head_dim), with the leading axes of the weights or 1; None if each
            query has a value of its own.
        evidence: what the weights may follow from; None if that is unknown.
        has_gradient: True if gradients flow to the weights.
        lines: the ``file:line`` of its product, its softmax and its product with the value, by
            "product", "softmax" and "value".
        is_one_call: True if one function ran both products, as ``scaled_dot_product_attention``.
        is_again: True if the module has multiplied the same weights with another value before.
    """

    name: str
    weights: Tensor
    value: Tensor | None
    evidence: Evidence | None
    has_gradient: bool
    lines: Mapping[str, str]
    is_one_call: bool = False
    is_again: bool = False

    def matrix(self, *, gradients: bool = False) -> AttentionMatrix:
        """Return the matrix of query and key if they give all the weights, else of the weights.

        With ``gradients``, all gradients that reached the weights reach the result's tensors.

        Raises:
            ValueError: weights beside a sink have gradients that no query, key or sink has.
        """
        if self.evidence is not None:
            with torch.no_grad():
                matrix = explained(self.evidence, gradients=gradients)
            if matrix is not None:
                return matrix
            if self.evidence.sink is not None:
                raise ValueError(_LEARNED_SINK)
        return AttentionMatrix(GivenScores(self.weights, are_weights=True))


class MetValue:
    """A detector of attention that is written as products.

    Args:
        model: the model; its parameters do not count as activations.
        record: called with each attention.
        refuse: called with the module's name, the reason and a line.
        leave: called in the same way for weights that met no value.
        absence: collects operations that might have been attention.
        note_changed: called with the weights of a softmax that are no weights when they meet a
            value, before they are refused; None: nobody wants to know.

    Attributes:
        listeners: the listeners of the operations that may begin a chain.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Callable[[Met], None],
        refuse: Callable[[str, str, str], None],
        leave: Callable[[str, str, str], None],
        absence: Absence,
        note_changed: Callable[[Met], None] | None = None,
    ) -> None:
        self._record, self._refuse, self._absence = record, refuse, absence
        self._leave, self._note_changed = leave, note_changed
        self._buffers = model.buffers
        self._parameters = Parameters(model)
        self._tracks: Storages[Track] = Storages()
        self._dropout = Dropout(self._tracks)
        self._gathered: Storages[int] = Storages()  # the axes of an index that chose rows
        self._outputs: Storages[tuple[str, int]] = Storages()  # a module, and its softmaxes so far
        self._softmaxes = 0
        self._multiplied: Storages[bool] = Storages()  # products of two activations, by element
        self._factors: Storages[_Factors] = Storages()
        self._powers: Storages[bool] = Storages()
        self._chosen: Storages[bool] = Storages()  # numbers that an index chose
        self._of_groups: Storages[str] = Storages()  # powers over their sum in a group: the line
        self._projected: Storages[int] = Storages()  # features of a linear layer: their rows
        self._with_norm: Storages[bool] = Storages()  # scores whose logsumexp was taken
        self._with_softmax: Storages[bool] = Storages()
        self._in_blocks: dict[str, Tensor] = {}  # the last query of scores with both
        self._sampled: set[str | None] = set()
        self._empty: set[str | None] = set()  # modules with a product of no elements
        self._open: list[Softmax] = []
        self._met: WeakSet[Softmax] = WeakSet()
        self.listeners: Mapping[Callable[..., Any], Listener] = {
            **dict.fromkeys(COPIES, self._copy),
            **dict.fromkeys(GATHERS, self._gather),
            **dict.fromkeys(PRODUCTS, self._multiply_matrices),
            **dict.fromkeys(MULTIPLICATIONS, self._multiply),
            **dict.fromkeys(SOFTMAXES, self.on_softmax),
            **dict.fromkeys(NORMS, self._on_norm),
            **dict.fromkeys(SAMPLERS, self._sample),
            **dict.fromkeys(SUMS, self._sum),
            **dict.fromkeys(DISTANCES, self._distance),
            **dict.fromkeys(DIVISIONS, self._divide),
            **dict.fromkeys(ADDITIONS, self._add),
            **dict.fromkeys(EXPONENTIALS, self._exponential),
            **dict.fromkeys(RECIPROCALS, self._reciprocal),
        }
        self._on_chain: Mapping[Callable[..., Any], Listener] = {
            **dict.fromkeys(CHANCE, self._dropout.draw),
            **dict.fromkeys(DROPOUTS, self._drop),
        }

    def listener_of(self, func: Callable[..., Any]) -> Listener | None:
        """Return the listener of an operation that ``listeners`` lacks.

        It is None while nothing is tracked.
        """
        return self._on_chain.get(func, self.follow) if self._tracks else None

    def finish(self) -> None:
        """Refuse each attention whose weights met no value in a product."""
        self._forget(*self._open)

    def _forget(self, *ended: Softmax) -> None:
        """Forget freed storages, and refuse attention whose weights were freed without a value."""
        self._factors.forget()  # they hold weights
        self._tracks.forget()
        alive = {id(track.softmax) for track in self._tracks}
        gone = [each for each in self._open if id(each) not in alive or each in ended]
        while gone:
            self._give_up(gone.pop())
        self._open = [each for each in self._open if not each.is_met]
        self._tracks.forget()

    def _give_up(self, softmax: Softmax) -> None:
        if not softmax.is_met and softmax.name is not None and softmax.is_written_out:
            fate = softmax.fate or "meet no value in a product of matrices"
            how = f"exponentials of scores ({softmax.line}) {fate}"
            self._absence.note_missing(softmax.name, how, is_certain=False)
        elif not softmax.is_met and softmax.name is not None:
            reason = _UNMET.format(softmax.line)
            if softmax.fate:
                reason = _UNREAD.format(softmax.line, softmax.fate)
            self._leave(softmax.name, reason, softmax.line)
        softmax.meet()

    # Products

    def _multiply_matrices(self, operation: Operation) -> None:
        self._forget()
        self._note_gradients(operation)
        self._absence.note_product(operation)
        factors = list(tensors_in(operation.args))
        if not all(map(are_dense_reals, factors)):
            self._note_fate(operation, factors, "meet sparse or complex numbers")
            if not all(each.layout == torch.strided for each in factors):
                return
        projects = any(map(self._parameters.projects, factors))
        output = cast(Tensor, operation.output)
        if projects and output.ndim:
            self._projected.put(output, output.numel() // max(output.shape[-1], 1))
        if not (output.is_nested or output.numel() or projects):
            self._empty.add(operation.module())
        if (projects and not self._tracks) or output.is_nested or not output.numel():
            return
        with apart():
            product = written(operation.func, operation.args, operation.kwargs)
        self._combine(operation, product, projects=projects)

    def _note_fate(self, operation: Operation, inputs: Iterable[Tensor], fate: str) -> None:
        """Note what was done to weights, in case that they meet no value."""
        for track in map(self._tracks.of, inputs):
            if track is not None and track.softmax is not None:
                fate = (
                    track.softmax.fate
                    or f"{fate} ({operation.line()}), whose products are not read"
                )
                track.softmax.fate = fate

    def _combine(self, operation: Operation, product: Written, *, projects: bool) -> None:
        """Handle a product: one of weights and a value, of a parameter, or a new one of scores."""
        tracked = [
            (track, side, value)
            for side, value in product.sides
            if (track := self._tracks.of(side)) is not None
        ]
        normalised = [each for each in tracked if each[0].softmax is not None]
        if normalised:  # they multiply a value, which an own parameter may have projected
            tracked = [each for each in tracked if not _is_projected(each[0])]
        if any(is_of_scores(track) for track, *_ in normalised):
            tracked = [each for each in tracked if not _is_value(*each[:2], product)]
        mixed = [(track, side) for track, side, _ in tracked if is_over_heads(track, side)]
        if mixed:
            self._follow_mixture(operation, *mixed[0])
        elif any(self._parameters.has(factor) for factor in (product.left, product.right)):
            if not tracked and not projects:
                self._begin(operation, product)
            for track, side, value in normalised:
                if not projects or _is_over_keys(track, side):
                    self._meets(operation, track, side, value, product)
        else:
            if len(tracked) == 2 and (
                all(is_of_scores(each[0]) for each in tracked)
                or all(_may_be_weights(each[0], each[1]) for each in tracked)
            ):
                self._mix(operation, [track for track, *_ in tracked])
                return
            for track, side, value in (*normalised, *tracked):
                if self._meets(operation, track, side, value, product):
                    return
            self._begin(operation, product)

    def _begin(self, operation: Operation, written_: Written) -> None:
        """Track the product of two activations as scores."""
        output = cast(Tensor, operation.output)
        axes = Axes.of(output, written_.steps)
        left, right = written_.left, written_.right.mT
        gathered = any(self._gathered.of(factor) for factor in (left, right))
        owned = [factor for factor in (left, right) if self._parameters.has(factor)]
        running = operation.running()
        # PyTorch's parametrizations compute a parameter from others.
        if len(owned) == 2 or any(".parametrizations." in f".{name}." for name in running):
            return
        product = Product(
            left,
            right,
            running,
            operation.line(),
            operation.instruction(),
            gathered=gathered,
            parameter=owned[0] if owned else None,
            sources=tuple(each for each in tensors_in(operation.args) if each.requires_grad),
        )
        steps = Steps(rounding_of(output), written_.alpha)
        if written_.added is not None and written_.beta:
            steps = steps.plus(written_.added, axes, written_.beta)
        self._tracks.put(output, Track(product, axes, steps).into(output))

    def _follow_mixture(self, operation: Operation, track: Track, side: Tensor) -> None:
        """Track scores or weights whose heads a product mixes."""
        output = cast(Tensor, operation.output)
        if output.numel() == side.numel():
            mixed = track.into(output, axes=None, before=None, is_changed=True)
            self._tracks.put(output, mixed)

    def _mix(self, operation: Operation, tracks: list[Track]) -> None:
        """Track the product of two weights, which may be weights itself.

        That of one softmax alone, as in a penalty on its rows, need not meet a value.
        """
        softmaxes = [track.softmax for track in tracks if track.softmax is not None]
        mixed = next(iter(softmaxes), None)
        if mixed is not None and any(each is not mixed for each in softmaxes):
            for softmax in softmaxes:
                softmax.meet()
            mixed = replace(mixed, scores=None, axes=None, product=None, is_met=False, parts=[])
            self._open.append(mixed)
        output = cast(Tensor, operation.output)
        axes = Axes.of(output, contiguous(output.shape))
        self._tracks.put(
            output,
            tracks[0].into(
                output, product=None, axes=axes, before=None, softmax=mixed, is_changed=True
            ),
        )

    # The value

    def _meets(
        self, operation: Operation, track: Track, side: Tensor, value: Tensor, product: Written
    ) -> bool:
        """Record weights (batch, rows, keys) that multiply a value (batch, keys, head_dim).

        Return False if the operand is no weights, and the product is an ordinary one.
        """
        softmax = track.softmax
        with apart():
            side, value = apart_from_heads(track, side, value)
            looked_through = before_dropout(track, side)
            before = side if looked_through is None else looked_through
            fault = _fault(before, max(track.rounding, rounding_of(before)))
            if looked_through is None and fault is not None:
                fault = f"more than dropout was done to them, and {fault}"
            if fault == _EMPTY and softmax is not None:
                fault = None  # no row has a key
            if fault is None and softmax is None and not track.is_changed:
                return False  # a product alone, such as a power of a fixed matrix
            shaped = shaped_weights(operation, track, side)
            turned = query_axis(track, shaped)
            if softmax is not None and not softmax.is_of_scores:
                rows = side.shape[-2]
                if fault is not None or not self._attends(operation, softmax, value, rows):
                    return False
            weights = shaped if before is side else before.reshape(shaped.shape)
            in_groups = grouped(track, shaped)
            met_value = shaped_value(value, in_groups.shape[:-2])
            if turned is not None:
                is_in_batch = math.prod(shaped.shape[:turned]) < side.shape[0]
                shaped, weights = shaped.movedim(turned, -2), weights.movedim(turned, -2)
                in_groups = shaped
                met_value = None if is_in_batch else shaped_value(value, shaped.shape[:-2])
            evidence = evidence_of(track, in_groups, weights.reshape(in_groups.shape))
            if fault is not None and evidence is not None and evidence.sink is not None:
                # Weights beside a sink sum to less than 1.
                fault = None if explained(evidence, gradients=False) is not None else fault
        if fault is None and product.alpha != 1:
            fault = "their product with the value is scaled"
        if fault is not None and self._factors.of(side) is not None:
            fault = f"a value has multiplied them element by element before, and {fault}"
        if fault is not None:
            self._tell_changed(operation, track, side, value)
            if softmax is not None and not softmax.is_written_out:
                return self._refuse_changed(operation, track, fault)
            self._suspect(operation, track, fault)
            return False
        name, lines = self._owner(operation, track) or "", lines_of(operation, track)
        flows, product_of = _has_gradient(operation, side), track.product
        is_one_call = product_of is not None and product_of.call == operation.instruction()
        met = Met(name, weights, met_value, evidence, flows, lines, is_one_call)
        self._meet(operation, track, met, shaped, value)
        self._outputs.put(cast(Tensor, operation.output), (name, self._softmaxes))
        return True

    def _meet(
        self, operation: Operation, track: Track, met: Met, shaped: Tensor, value: Tensor
    ) -> None:
        """Record an attention unless its matrix would not be that of its tokens, in order."""
        softmax, product, evidence = track.softmax, track.product, met.evidence
        axes = None if track.axes is None else track.axes.of_view(shaped)
        part = None
        if axes is not None:
            longer = [pair for pair in zip(axes.sizes, axes.steps, strict=True) if pair[0] > 1]
            part = (tuple(longer), axes.first)
        if softmax is not None:
            softmax.meet()
            self._met.add(softmax)
            users = [name for name, used in softmax.parts if used == part]
            if users and evidence is not None and evidence.is_exact:
                if met.name in users:
                    self._record(replace(met, is_again=True))
                    return
                met = replace(met, name=operation.module() or "")  # by another layer
        if not met.name:
            return
        line = met.lines.get("softmax", met.lines["value"])
        module, before = self._outputs.of(value) or ("", 0)
        # A softmax that ran after this output may attend to it, as in an attention to sentences.
        if module == met.name and (softmax is None or softmax.index <= before):
            self._refuse(met.name, _COMPOSITE.format(line), line)
        elif (product is not None and product.gathered) or self._gathered.of(value):
            self._refuse(met.name, _GATHERED.format(line), line)
        else:
            self._record(met)
            if softmax is None or part is None or evidence is None:
                return
            if "gives_weights" in vars(evidence) and evidence.is_exact:  # it was recorded
                softmax.parts.append((met.name, part))

    def _tell_changed(
        self, operation: Operation, track: Track, side: Tensor, value: Tensor
    ) -> None:
        """Tell of weights that are no weights, with the value that they meet."""
        if self._note_changed is None or track.softmax is None:
            return
        name, lines = self._owner(operation, track) or "", lines_of(operation, track)
        self._note_changed(Met(name, side, value, None, False, lines))

    def _refuse_changed(self, operation: Operation, track: Track, fault: str) -> bool:
        """Refuse the weights of a softmax that are no weights when they meet a value."""
        softmax = cast(Softmax, track.softmax)
        softmax.meet()
        name = self._owner(operation, track)
        if name is not None and not is_outer(track):
            reason = _CHANGED.format(softmax.line, operation.line(), fault)
            self._refuse(name, reason, softmax.line)
        return True

    def _suspect(self, operation: Operation, track: Track, fault: str | None) -> None:
        """Note scores that meet a value without a softmax in the module of their product."""
        product, name = track.product, operation.module()
        if track.softmax is not None and name is not None and not is_outer(track):
            how = f"exponentials of scores ({track.softmax.line}) multiply a value: {fault}"
            self._absence.note_missing(name, how, is_certain=False)
            return
        if product is None or product.parameter is not None or is_outer(track):
            return
        if track.axes is None and not track.is_changed:
            return
        if any(map(self._is_buffer, tensors_in(operation.args))):
            return
        if name is not None and name in product.modules:
            how = f"scores meet a value ({operation.line()}) without a softmax"
            self._absence.note_missing(name, f"{how}: {fault}", is_certain=False)

    def _attends(self, operation: Operation, softmax: Softmax, value: Tensor, rows: int) -> bool:
        """Return True if the softmax of anything but a product of activations is an attention.

        Features choose among experts, codes and labels, and one row may be that of a router, which
        mixes outputs of each token. What may be attention and is not recorded is noted.
        """
        is_sampled, is_stored = operation.module() in self._sampled, self._is_stored(value)
        if (self._outputs.of(value) or ("",))[0] == operation.module():
            return True
        is_product = self._tracks.of(value) is not None  # as in linear attention
        is_unknown = softmax.is_over_features is None and rows == 1
        if not (is_sampled or is_stored or is_product or softmax.is_over_features or is_unknown):
            return True
        is_choice = softmax.is_choice and is_stored
        if is_sampled or not (is_choice or (softmax.is_over_features and rows == 1)):
            self._name_softmax(operation, softmax, value)
        return False

    def _name_softmax(
        self, operation: Operation, softmax: Softmax, value: Tensor, *, is_certain: bool = True
    ) -> None:
        """Note the softmax of anything but a product of activations, which multiplies a value."""
        how = f"a softmax ({softmax.line}) of no matrix product of query and key multiplies a value"
        if self._is_stored(value):
            how = f"a softmax ({softmax.line}) multiplies a parameter, so its values are learned"
        if (name := operation.module()) is not None:
            self._absence.note_missing(name, how, is_certain=is_certain)

    def _owner(self, operation: Operation, track: Track) -> str | None:
        """Return the innermost running module that also ran the product of query and key.

        This skips a module for the second product alone, which several layers may share.
        """
        running = operation.running()
        before = () if track.product is None else track.product.modules
        both = (name for name in running if name in before)
        return next(both, next(iter(running), None))

    # Softmax

    def on_softmax(self, operation: Operation) -> None:
        """Track the output of a softmax."""
        source, dim = operation.args[:2]
        output = cast(Tensor, operation.output)
        name = operation.module()
        if self._is_without_rows(operation, output):
            return
        dim %= source.ndim
        self._note_gradients(operation)
        self._absence.note_product(operation)
        track = self._tracks.of(source)
        for earlier in self._met:
            earlier.free()
        self._met.clear()
        self._note_block(operation, self._with_softmax, self._with_norm)
        self._softmaxes += 1
        axes = None if track is None or track.axes is None else track.axes.of_view(source)
        steps = track.steps if track is not None else Steps(torch.finfo(output.dtype).eps)
        product = track.product if track is not None else None
        if product is not None:
            name = self._owner(operation, cast(Track, track))
        over_features = is_over_rows_of_parameter(product, axes, dim)
        if over_features is None:
            over_features = self._is_over_features(source, dim)
        softmax = Softmax(
            name,
            operation.line(),
            source if product is not None else None,
            axes,
            dim,
            steps,
            product,
            is_of_scores=track is not None and (product is None or product.parameter is None),
            is_over_features=over_features,
            is_choice=bool(product is None and over_features)
            and source.numel() == (self._projected.of(source) or 0) * source.shape[dim],
            index=self._softmaxes,
        )
        if softmax.is_of_scores:
            self._open.append(softmax)
        if track is not None and track.softmax is not None:
            track.softmax.meet()  # this softmax is the one that counts
        moved = None if axes is None else axes.moved(output)
        if moved is None:
            moved, product = Axes.of(output, contiguous(output.shape)), None
            softmax.axes = moved if dim == output.ndim - 1 else None
        followed = Track(product, moved, steps, softmax, rounding_of(output))
        self._tracks.put(output, followed.into(output))

    def _is_without_rows(self, operation: Operation, output: Tensor) -> bool:
        """Return True if a softmax has no rows to record, and refuse or name what it is of."""
        name = operation.module()
        if output.is_nested:
            if name is not None:
                self._refuse(name, NESTED, operation.line())
            return True
        is_empty = not output.numel()
        kind = "sparse scores" * output.is_sparse or "no tokens" * (
            is_empty and name in self._empty
        )
        if kind and name is not None:
            how = f"a softmax ({operation.line()}) of {kind}"
            self._absence.note_missing(name, how, is_certain=output.is_sparse)
        return is_empty or not output.ndim

    def _on_norm(self, operation: Operation) -> None:
        self._note_block(operation, self._with_norm, self._with_softmax)
        self.follow(operation)

    def _note_block(
        self, operation: Operation, taken: Storages[bool], needed: Storages[bool]
    ) -> None:
        """Note a second block of keys of one query that has both a softmax and a logsumexp."""
        scores = operation.args[0]
        track, name = self._tracks.of(scores), operation.module()
        if track is None or track.product is None or track.softmax is not None or name is None:
            return
        taken.put(scores, True)
        if not needed.of(scores):
            return
        query, earlier = track.product.left, self._in_blocks.get(name)
        with apart():
            if earlier is not None and torch.equal(earlier, query):
                self._absence.note_missing(name, _BLOCKS.format(operation.line()))
        self._in_blocks[name] = query

    def _is_over_features(self, source: Tensor, dim: int) -> bool | None:
        """Return True if an axis has features of a linear layer; None if it may have."""
        rows = self._projected.of(source)
        if rows is None:
            return None if dim == source.ndim - 1 else False
        size = source.untyped_storage().nbytes() // source.element_size()
        return source.stride(dim) * rows < size

    def _exponential(self, operation: Operation) -> None:
        """Track the exponentials of a softmax that is written out."""
        source, output = operation.args[0], cast(Tensor, operation.output)
        track = self._tracks.of(source)
        if track is None and not self._parameters.has(source):
            self._powers.put(output, True)
            self._normalise(operation)
            return
        axes = None if track is None or track.axes is None else track.axes.of_view(source)
        moved = None if axes is None else axes.moved(output)
        if track is None or storage_key(source) == storage_key(output):
            self.follow(operation)
            return
        softmax = Softmax(
            operation.module(),
            operation.line(),
            None if moved is None else source,
            axes,
            source.ndim - 1,
            track.steps,
            track.product,
            is_written_out=True,
        )
        if track.softmax is not None and not track.softmax.is_written_out:
            softmax = track.softmax
        elif track.softmax is not None:
            track.softmax.meet()  # these exponentials are the ones that count
        is_known = moved is not None or track.product is None
        if softmax.is_written_out and is_known and not is_outer(track):
            self._open.append(softmax)
        rounding = _OF_LOGARITHMS * rounding_of(output)
        self._tracks.put(
            output,
            track.into(output, axes=moved, softmax=softmax, rounding=rounding, before=None),
        )

    def _reciprocal(self, operation: Operation) -> None:
        """Note 1 / x, which a kernel of distances may be made of."""
        self._powers.put(operation.output, True)
        self.follow(operation)

    def _normalise(self, operation: Operation) -> None:
        """Track powers of no scores whose rows sum to 1, which are a softmax of anything else."""
        powers = cast(Tensor, operation.output)
        if powers.is_nested or powers.ndim < 2 or powers.shape[-1] == 1 or not powers.numel():
            return
        rounding = rounding_of(powers)
        with apart():
            if _fault(powers.reshape(-1, *powers.shape[-2:]), rounding) is not None:
                return
        softmax = Softmax(
            operation.module(),
            operation.line(),
            None,
            None,
            powers.ndim - 1,
            steps := Steps(rounding),
            is_of_scores=False,
            is_over_features=None,
        )
        axes = Axes.of(powers, contiguous(powers.shape))
        self._tracks.put(powers, Track(None, axes, steps, softmax, rounding).into(powers))

    # Operations in between

    def _drop(self, operation: Operation) -> None:
        if not self._dropout.drop(operation):
            self.follow(operation)

    def follow(self, operation: Operation) -> None:
        """Track what an operation makes of scores or weights."""
        if not self._tracks:
            return
        self._note_gradients(operation)
        inputs = [
            (track, tensor)
            for tensor in tensors_in((operation.args, *operation.kwargs.values()))
            if (track := self._tracks.of(tensor)) is not None and tensor.numel()
        ]
        if any(track.softmax is not None for track, _ in inputs):  # what they multiply is a value
            inputs = [each for each in inputs if not _is_projected(each[0])]
        if not inputs:
            return
        changed = list(written_by(operation))
        # A tensor as large as the output counts most, then scores and their weights, then weights,
        # then the larger one.
        outputs = list(tensors_in((operation.output,)))
        count = max((output.numel() for output in outputs), default=0)

        def rank(item: tuple[Track, Tensor]) -> tuple[bool, bool, bool, int]:
            track, tensor = item
            size, softmax = tensor.numel(), track.softmax
            is_other = softmax is not None and not softmax.is_of_scores
            return (size >= count, not is_other, softmax is not None, size)

        track, source = max(inputs, key=rank)
        if track.softmax is None and operation.func in SHAPES_ALONE:
            return
        size = source.numel()
        if isinstance(operation.args[0], list | tuple):  # parts that are joined
            size = sum(tensor.numel() for _, tensor in inputs if tensor.shape == source.shape)
        outputs += [each for each in changed if not any(each is output for output in outputs)]
        for output in outputs:
            if not are_dense_reals(output):
                self._note_fate(operation, [source], "became sparse or complex numbers")
            earlier = self._tracks.of(output)
            if earlier is not None and not any(output is each for each in changed):
                earlier.note_view(output)
                continue
            if earlier is None and not is_like(track, source, size, output):
                continue
            merged = track if earlier is None else earlier
            for part, _ in inputs:
                if part.softmax is not None and part.softmax is not merged.softmax:
                    part.softmax.meet()  # it is a part of the new weights
            if earlier is not None:
                self._rewrite(operation, output, earlier)
            else:
                self._extend(operation, track, source, output)

    def _extend(self, operation: Operation, track: Track, source: Tensor, output: Tensor) -> None:
        """Track a new storage that an operation made of scores or weights."""
        axes = None if track.axes is None else track.axes.of_view(source)
        axes = None if axes is None else axes.moved(output) or axes_of_copy(axes, output)
        steps, is_copy = track.steps, operation.func in COPIES
        if axes is None and (joined := with_column(operation, track, source, output)):
            axes, sink = joined
            steps = replace(steps, sink=sink)
        if track.softmax is None:
            steps = steps.after(operation, source, axes)
        if operation.func not in TERMS and self._has_learned(operation):
            steps = replace(steps, is_learned=True)
        followed = track.into(
            output,
            axes=axes,
            steps=steps,
            rounding=max(track.rounding, rounding_of(output)),
            is_changed=track.is_changed or not is_copy,
            shape=track.shape if is_copy else output.shape,
        )
        if axes is not None:
            followed.shapes.insert(0, (axes.sizes, axes.strides, axes.offset))
        elif is_copy and output.is_contiguous():
            sizes, first = tuple(source.shape), int(output.storage_offset())
            followed.shapes.insert(0, (sizes, contiguous(sizes), first))
        self._tracks.put(output, followed)

    def _note_gradients(self, operation: Operation) -> None:
        """Note scores and weights whose gradient is another one than that of query and key."""
        for tensor in tensors_in(operation.args if torch.is_grad_enabled() else ()):
            base = tensor._base  # pyright: ignore[reportPrivateUsage]
            track, is_altered = self._tracks.of(tensor), alters_gradient(tensor)
            if track is None or not (is_altered or (base is not None and alters_gradient(base))):
                continue
            steps = replace(track.steps, is_learned=True)
            self._tracks.put(tensor, replace(track, steps=steps))
            is_behind = is_altered and base is not None and track.softmax is not None
            if is_behind and (name := operation.module()) is not None:
                self._refuse(name, _BEHIND_VIEW, operation.line())

    def _has_learned(self, operation: Operation) -> bool:
        """Return True if a tensor that does not descend from the scores needs a gradient."""
        return any(
            each.requires_grad and self._tracks.of(each) is None
            for each in tensors_in(operation.args)
        )

    def _rewrite(self, operation: Operation, output: Tensor, track: Track) -> None:
        """Update the track of a storage that an operation writes to."""
        steps = track.steps
        axes = track.axes
        is_all = axes is not None and output.numel() == math.prod(axes.sizes)
        if track.softmax is None and axes is not None and is_all:
            steps = steps.after(operation, output, axes.of_view(output))
        if operation.func not in TERMS and self._has_learned(operation):
            steps = replace(steps, is_learned=True)
        shape = output.shape if output.numel() == math.prod(track.shape) else track.shape
        changed = replace(track, steps=steps, is_changed=True, shape=shape)
        self._tracks.put(output, changed)

    def _multiply(self, operation: Operation) -> None:
        """Track an elementwise product: a step, dropout, or an einsum over an axis of size 1."""
        first, second = operation.args[:2]
        are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
        if not are_tensors and self._powers.of(first):
            self._powers.put(operation.output, True)
        if not (are_tensors and self._multiply_tensors(operation, first, second)):
            self.follow(operation)

    def _multiply_tensors(self, operation: Operation, first: Tensor, second: Tensor) -> bool:
        """Track dropout and a product that einsum writes as ``mul``; return False for any other.

        Note other attention that multiplies its value element by element.
        """
        output, pairs = cast(Tensor, operation.output), ((first, second), (second, first))
        if any(self._dropout.thin(operation, *pair) for pair in pairs):
            return True
        if _is_outer_product(first, second) or self._is_of_one_key(first, second):
            with apart():
                product = broadcast_product(first, second)
            is_owned = any(map(self._parameters.has, (first, second)))
            tracks = [self._tracks.of(each) for each in (first, second)]
            is_other = any(t and t.softmax and not is_of_scores(t) for t in tracks)
            if product is not None and not is_owned and not is_other:
                self._copy_facts(first, product.left)
                self._copy_facts(second, product.right)
                self._combine(operation, product, projects=False)
                return True
        self._note_factors(output, first, second)
        for weights, value in pairs:
            line, name = self._of_groups.of(weights), operation.module()
            if line is not None and name is not None and output.numel() > weights.numel():
                how = f"a softmax over the edges of a graph ({line}) multiplies a value"
                self._absence.note_missing(name, how)
            track = self._tracks.of(weights)
            softmax = None if track is None else track.softmax
            if softmax is None or softmax.is_of_scores or output.numel() <= 2 * weights.numel():
                continue
            # A router multiplies the outputs of experts in the same way.
            is_learned = self._parameters.has(value) and not softmax.is_choice
            is_certain = is_learned or operation.module() in self._sampled
            if is_certain or (softmax.is_over_features is False and softmax.product is None):
                self._name_softmax(operation, softmax, value, is_certain=is_certain)
        return False

    def _note_factors(self, output: Tensor, first: Tensor, second: Tensor) -> None:
        """Note the product of two tensors whose sum may be scores, or the output of weights."""
        if (
            any(map(self._parameters.has, (first, second)))
            or min(first.numel(), second.numel()) < 2
        ):
            return
        factors = ((first, second), (second, first))
        tracks = [self._tracks.of(each) for each in (first, second)]
        for (weights, value), track in zip(factors, tracks, strict=True):
            if track is None or track.softmax is None or output.numel() <= weights.numel():
                continue
            softmax = track.softmax
            is_over_tokens = softmax.is_over_features is False and not softmax.is_of_scores
            if softmax.product is not None and is_over_tokens and not softmax.is_met:
                self._open.append(softmax)
            if softmax.is_of_scores or is_over_tokens:
                self._factors.put(output, (weights, value, geometry(output)))
                return
        are_activations = all(track is None or _is_projected(track) for track in tracks)
        if are_activations and storage_key(first) != storage_key(second):
            self._multiplied.put(output, True)

    def _add(self, operation: Operation) -> None:
        """Note the features of a linear layer to which it adds its bias, or track a step."""
        source, bias = operation.args[:2]
        rows = self._projected.of(source)
        if rows is not None and isinstance(bias, Tensor) and self._parameters.has(bias):
            self._projected.put(operation.output, rows)
        if self._chosen.of(source):
            self._chosen.put(operation.output, True)
        self.follow(operation)

    def _divide(self, operation: Operation) -> None:
        """Note a parameter that is divided by its norm as a parameter, or track a division."""
        (dividend, divisor), output = operation.args[:2], operation.output
        if self._parameters.has(dividend) and dividend.shape == output.shape:
            self._parameters.note_copy(dividend, output)
        elif isinstance(divisor, Tensor) and divisor.numel() < dividend.numel():
            self.follow(operation)
            if self._powers.of(dividend) and self._tracks.of(output) is None:
                self._normalise(operation)
        else:
            if self._powers.of(dividend) and self._chosen.of(divisor):
                self._of_groups.put(output, operation.line())
            self.follow(operation)

    def _sum(self, operation: Operation) -> None:
        """Track the sum of an elementwise product: it is a product that is written out."""
        source, output = operation.args[0], cast(Tensor, operation.output)
        factors = self._factors.of(source)
        if not output.ndim or not output.numel():
            return
        if factors is None and self._multiplied.of(source):
            self._begin_without_product(output)
        elif factors is None or not self._weigh(operation, factors):
            self.follow(operation)

    def _weigh(self, operation: Operation, factors: _Factors) -> bool:
        """Record weights that multiply a value element by element, and are summed over the keys."""
        weights, value, laid = factors
        source, dims = operation.args[:2]
        track = self._tracks.of(weights)
        if track is None or dims is None or len(dims) != 1 or geometry(source) != laid:
            return False
        with apart():
            product = weighted_sum(weights, value, dims[0], operation.output)
        if product is None:
            return False
        self._copy_facts(value, product.right)
        operation = operation._replace(args=(weights, value))
        return self._meets(operation, track, product.left, product.right, product)

    def _copy_facts(self, value: Tensor, copy: Tensor) -> None:
        """Note of a copy where the rows of a value come from."""
        for facts in (self._gathered, self._outputs):
            if (fact := facts.of(value)) is not None:
                cast("Storages[Any]", facts).put(copy, fact)

    def _distance(self, operation: Operation) -> None:
        """Track the distances of all rows of two activations as scores."""
        output = operation.output
        if output.numel() and not any(map(self._parameters.has, operation.args[:2])):
            self._begin_without_product(output)

    def _begin_without_product(self, scores: Tensor) -> None:
        steps = Steps(rounding_of(scores))
        self._tracks.put(scores, Track(None, None, steps).into(scores))

    def _is_of_one_key(self, first: Tensor, second: Tensor) -> bool:
        """Return True if one factor, and not both, holds weights over a single key."""
        tracks = [self._tracks.of(each) for each in (first, second)]
        tracked = [track for track in tracks if track is not None]
        tracked = [track for track in tracked if track.softmax is not None] or tracked
        is_product = first.ndim == second.ndim and first.is_floating_point()
        return is_product and len(tracked) == 1 and has_one_key(tracked[0])

    def _gather(self, operation: Operation) -> None:
        """Note tensors whose rows an index chose, so that they are no tokens in order."""
        source, output = operation.args[0], operation.output
        if not self._parameters.has(source):
            self._chosen.put(output, True)
        # A table, such as one of positions, has no axis for a batch, and rows that are no tokens.
        is_source = source.ndim > 2 or (source.ndim == 2 and not self._is_stored(source))
        if is_source and source.is_floating_point() and (axes := _axes_of_rows(operation)):
            self._gathered.put(output, axes)
            chosen = [
                track is not None
                and (track.softmax is None or is_of_scores(track))
                and not _is_projected(track)  # a router, which chooses tokens of an expert
                for track in map(self._tracks.of, tensors_in(operation.args[1:]))
            ]
            name = operation.module()
            if name is not None and self._tracks.of(source) is None and any(chosen):
                how = f"an index of the scores chooses a value ({operation.line()})"
                self._absence.note_missing(name, how)
        # Rows that an index of the weights chose are no weights.
        self.follow(operation._replace(args=operation.args[:1], kwargs={}))

    def _is_stored(self, tensor: Tensor) -> bool:
        """Return True for a parameter or a buffer of the model."""
        return self._parameters.has(tensor) or self._is_buffer(tensor)

    def _is_buffer(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return any(storage_key(buffer) == key for buffer in self._buffers())

    def _sample(self, operation: Operation) -> None:
        """Note a module that samples its value, as deformable attention does."""
        self._sampled.add(operation.module())
        self.follow(operation)

    def _copy(self, operation: Operation) -> None:
        """Note a copy of a parameter, or track a copy of scores or weights."""
        source = operation.args[0]
        if isinstance(source, Tensor) and self._parameters.has(source):
            if storage_key(source) != storage_key(operation.output):
                self._parameters.note_copy(source, operation.output)
            return
        rows = self._projected.of(source)
        if rows is not None:
            self._projected.put(operation.output, rows)
        # Heads that are chosen by an index lie before the last axis, too, until they are copied.
        if (axes := self._gathered.of(source) or 0) > 1:
            self._gathered.put(operation.output, axes)
        self.follow(operation)


def _fault(weights: Tensor, rounding: float) -> str | None:
    """Return why an operand (batch, rows, keys) is no attention weights; None if it is.

    ``rounding`` is the relative error of the least precise dtype that it had.
    """
    if weights.layout != torch.strided or not weights.is_floating_point():
        return "they are no dense numbers"
    # Long rows in float32 lose this much in their sum; 16 bits are summed in float32, too.
    single = torch.finfo(torch.float32).eps
    tolerance = max(rounding, 32 * single if rounding >= single else 1e-9)
    # Most operands that are no weights show it in the first row.
    for part in (weights[:1, :1], weights):
        wide = part if part.element_size() > 2 else part.float()
        dead = wide.isnan().all(-1)
        sums = wide.sum(-1).masked_fill(dead, 0.0)
        least = wide.amin(-1).masked_fill(dead, 0.0)
        off = ((sums - 1).abs() > tolerance) & (sums != 0)
        if bool(sums.isnan().any()):
            return "some of them are NaN"
        if bool((least < 0).any()):
            return f"the least of them is {float(least.min()):.3g}"
        if bool(off.any()):
            reason = f"a row sums to {float(sums[off][0]):.7g}"
            columns = weights.float().nan_to_num().sum(-2)
            is_turned = bool(((columns - 1).abs() <= tolerance).all())
            return reason + ", and each column to 1: it runs over the queries" * is_turned
    return None if bool((weights != 0).any()) else _EMPTY


def _is_over_keys(track: Track, side: Tensor) -> bool:
    """Return True for the softmax of no scores whose rows have more than one key."""
    return track.softmax is not None and not track.softmax.is_of_scores and side.shape[-1] > 1


def _is_projected(track: Track) -> bool:
    """Return True for the product of an activation and a parameter, without a softmax."""
    is_learned = track.product is not None and track.product.parameter is not None
    return is_learned and track.softmax is None


def _is_value(track: Track, side: Tensor, product: Written) -> bool:
    """Return True for a factor beside weights that is a product, but no weights."""
    if track.softmax is not None or not track.is_changed:
        return track.softmax is None
    factor = side if side is product.left else side.mT
    with apart():
        return _fault(factor, max(track.rounding, rounding_of(factor))) is not None


def _may_be_weights(track: Track, side: Tensor) -> bool:
    """Return True for scores that were changed, or their weights, without a negative number."""
    if not (is_of_scores(track) or (track.softmax is None and track.is_changed)):
        return False
    with apart():
        return not bool((side < 0).any())  # NaN is none


def _has_gradient(operation: Operation, side: Tensor) -> bool:
    """Return True if gradients flow to a factor of a product, of which a view is given."""
    return any(
        each.requires_grad and storage_key(each) == storage_key(side)
        for each in tensors_in(operation.args)
    )


def _is_outer_product(first: Tensor, second: Tensor) -> bool:
    """Return True if einsum may compute scores with ``mul`` because head_dim is 1."""
    if first.ndim != second.ndim or first.ndim < 3 or first.is_nested or second.is_nested:
        return False
    sizes = [*zip(first.shape, second.shape, strict=True)]
    rows, columns = sum(n > m == 1 for n, m in sizes), sum(m > n == 1 for n, m in sizes)
    return sizes[-1] == (1, 1) and rows == columns == 1


def _axes_of_rows(operation: Operation) -> int:
    """Return how many axes an index has that chooses rows; 0 if it chooses none.

    An index of several axes chooses blocks of rows, on whatever axis they lie.
    """
    source, chosen = operation.args[:2]
    if isinstance(chosen, list | tuple):
        index = list(cast("list[Tensor | None]", chosen))
        used = [each for each in index[: source.ndim - 1] if each is not None]
        has_rows = len(index) >= source.ndim - 1 and index[source.ndim - 2] is not None
        has_blocks = any(each.ndim > 1 and each.dtype != torch.bool for each in used)
        return 2 if has_blocks else int(has_rows)
    return int(int(chosen) % source.ndim == source.ndim - 2)


_OF_LOGARITHMS = 2.5  # an exponential of a rounded logarithm of 5 nats is off by 2.5 roundings
_EMPTY = "all of them are 0"
_CHANGED = (
    "the weights of the softmax ({}) are no attention weights when they multiply the value ({}): "
    "{}.\n"
    "    Mask, scale and reorder before the softmax, over the axis of the keys, dim=-1."
)
_BLOCKS = (
    "one query has several softmaxes and logsumexps ({}), which merge blocks of keys; each block "
    "is recorded as an attention"
)
_UNMET = (
    "the weights of the softmax ({}) met no value in a product that observe reads.\n"
    "    Multiply them with the value as weights @ value, not element by element. If they are the "
    "likeness of two inputs, as in CLIP, there is no value, and nothing is missing."
)
_UNREAD = (
    "the weights of the softmax ({}) {}.\n"
    "    Multiply them with the value as a dense tensor of real numbers."
)
_LEARNED_SINK = (
    "its weights beside a sink sum to less than 1, and gradients flow to more than its query, key, "
    "bias and sink.\n    Observe it under torch.no_grad()."
)
_COMPOSITE = (
    "its output is a product of several softmaxes ({}), as in Nyström attention; none of them "
    "alone is its attention.\n    Record the layers that multiply one softmax with a value."
)
_BEHIND_VIEW = (
    "a function or a hook of its own changes the gradient of a view of its weights.\n"
    "    Let the function return a copy, x.clone(), or observe under torch.no_grad()."
)
_GATHERED = (
    "an index chose the rows of its query, key or value ({}), so they are not the tokens in their "
    "order.\n    Compute the scores of all tokens, and mask those that are left out."
)
