"""Notes what a model puts together of parts: rows in a loop, cells, heads, blocks, padding.

Scores in parts are one product again as soon as an operation takes all of them (``assembly.py``).
Weights in parts are still what their softmaxes gave where each row holds those of one of them, and
zeros beside.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.element_axes import Axes, translated
from regard.capture.product_axes import Untold
from regard.capture.score_assembly import Piece, assembled
from regard.capture.tensor_tracks import Part, Parts, Scores, Track, Tracks, Weights, storage_key
from regard.capture.weight_mixing import is_mutable, place_of, tensors_in
from regard.tracing.tracer import Operation, apart

__all__ = ["JOINS", "Gathering"]


class Gathering:
    """Hears how scores and weights are put together.

    Args:
        tracks: what the storages hold.
    """

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks

    def settle(self, operation: Operation) -> None:
        """Find the whole of scores in parts that an operation has taken as a whole."""
        if not self._tracks.has_parts:
            return
        taken = operation.args[1:] if operation.func is aten.copy_.default else operation.args
        for tensor in tensors_in(taken):
            track = self._tracks.of(tensor)
            if track is None or not isinstance(track.stage, Parts) or _is_view(operation, track):
                continue
            if not tensor.numel():
                continue  # nothing of them
            pieces = [
                Piece(part.stage.product, part.stage.steps, part.axes)
                for part in track.stage
                if isinstance(part.stage, Scores)
            ]
            if len(pieces) == len(list(track.stage)):
                try:
                    with apart():
                        found = assembled(pieces, tensor)
                    track.stage.whole = Scores(found.product, found.steps), found.axes
                except Untold:
                    track.stage.whole = None

    def copy_into(self, operation: Operation) -> bool:
        """Scores or weights that go into a part of a tensor; whether it holds parts alone."""
        target, source = cast("tuple[Tensor, Tensor]", operation.args[:2])
        track, held = self._tracks.of(source), self._tracks.held_by(target)
        seen = None if track is None or track.axes is None else track.axes.seen_as(source)
        moved = None if seen is None else seen.moved(target)
        if track is None or moved is None or not isinstance(track.stage, Scores | Weights):
            return False
        if target.numel() == _length(target) or _are_exchanged(held, track.stage, target):
            return False
        if held is None:
            self._put(operation, target, [Part(moved, track.stage)])
        elif isinstance(held.stage, Parts):
            held.stage.add(_light(Part(moved, track.stage)))
        else:
            return False
        return True

    def join(self, operation: Operation) -> bool:
        """Scores that are stacked or put side by side, or padded; whether they are parts now."""
        stages = map(self._tracks.stage_of, tensors_in(operation.args))
        if not any(isinstance(stage, Scores | Weights | Parts) for stage in stages):
            return False
        output, parts = cast(Tensor, operation.output), list[Part]()
        with apart():
            for tensor, there in _regions(operation, output):
                parts += self._parts_of(tensor, there)
        weights = [part for part in parts if isinstance(part.stage, Weights)]
        if not parts or len(weights) > 1 or (weights and len(parts) > 1):
            return False
        self._put(operation, output, parts)
        return True

    def _parts_of(self, tensor: Tensor, there: Tensor) -> Iterator[Part]:
        """What a tensor holds, as it lies in a view of its shape elsewhere."""
        track = self._tracks.of(tensor)
        if track is None:
            return
        held = list(track.stage) if isinstance(track.stage, Parts) else list[Part]()
        if isinstance(track.stage, Scores | Weights) and track.axes is not None:
            held = [Part(track.axes, track.stage)]
        for part in held:
            moved = _moved(part.axes, tensor, there)
            if moved is not None:
                yield Part(moved, part.stage)

    def copy(self, operation: Operation, parts: Parts) -> bool:
        """A copy of parts; whether they lie in it as they did."""
        source, output = cast(Tensor, operation.args[0]), cast(Tensor, operation.output)
        alike = source.stride() == output.stride() and not source.storage_offset()
        if alike and source.numel() == _length(source) == output.numel():
            self._put(operation, output, list(parts))
            return True
        return False

    def _put(self, operation: Operation, target: Tensor, parts: Sequence[Part]) -> None:
        together = Parts(target, place_of(operation))
        for part in parts:
            together.add(_light(part))
        self._tracks.put(target, None, together)

    def holds_softmaxes(self, parts: Parts, tensor: Tensor, axis: int) -> bool:
        """Whether each row of a tensor holds the weights of one softmax, and zeros beside them.

        Args:
            parts: of its storage.
            tensor: that meets a value.
            axis: of the keys.
        """
        with apart():
            taken = torch.zeros(_length(tensor), dtype=torch.bool, device=tensor.device)
            rows, all_shown = cast("Tensor | None", None), True
            if not _in_order(parts):
                return False
            for part in parts:
                weights = part.stage
                if not isinstance(weights, Weights) or weights.trouble is not None:
                    return False
                all_shown &= weights.settle() and _is_whole(part.axes, weights)
                along = part.axes.along(weights.normal, weights.length)
                if along is None or part.axes.strides[along] != tensor.stride(axis):
                    return False
                own = torch.zeros_like(taken)
                own.as_strided(part.axes.sizes, part.axes.strides, part.axes.offset).fill_(True)
                taken |= own
                here = _seen_by(tensor, own).any(axis).int()
                rows = here if rows is None else rows + here
            inside = _seen_by(tensor, taken)
            if rows is None or not (all_shown or bool(rows.all())):
                return False
            alone = int(rows.max()) <= 1
            return alone and not bool(tensor.masked_fill(inside, 0).any())


def _is_whole(axes: Axes, weights: Weights) -> bool:
    """Whether a part shows all that a softmax has given."""
    meeting = weights.meeting
    return meeting is not None and math.prod(axes.sizes) == math.prod(meeting.axes.sizes)


def _in_order(parts: Parts) -> bool:
    """Whether weights of one product lie in the order in which they lay there."""
    last: dict[object, tuple[int, int]] = {}
    for part in sorted(parts, key=lambda part: part.axes.offset):
        if isinstance(part.stage, Weights) and part.stage.origin is not None:
            mark, start = part.stage.origin
            place = start, part.axes.start
            if place < last.get(mark, place):
                return False
            last[mark] = place
    return True


def _length(tensor: Tensor) -> int:
    """How many numbers the storage of a tensor has room for."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _light(part: Part) -> Part:
    """A part of weights without what only the softmax itself needs."""
    if not isinstance(part.stage, Weights):
        return part
    return replace(part, stage=replace(part.stage, powers=None, finding=None))


def _are_exchanged(held: Track | None, stage: Scores | Weights, target: Tensor) -> bool:
    """Whether weights of one softmax are put where others of it are."""
    parts = None if held is None else held.stage
    if not isinstance(parts, Parts) or not isinstance(stage, Weights) or stage.meeting is None:
        return False
    own = (part.stage for part in parts)
    alike = any(isinstance(each, Weights) and each.meeting is stage.meeting for each in own)
    return alike and parts.are_in(target)


def _seen_by(tensor: Tensor, storage: Tensor) -> Tensor:
    """Another storage of as many numbers, seen as a tensor sees its own."""
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _moved(axes: Axes, tensor: Tensor, there: Tensor) -> Axes | None:
    """A part of a tensor, as it lies in a view of the tensor's shape elsewhere."""
    basis = zip(tensor.shape, tensor.stride(), there.stride(), strict=True)
    offset = axes.offset - int(tensor.storage_offset())
    if axes.seen_as(tensor) is not None:
        seen = cast(Axes, axes.seen_as(tensor))
        return Axes.of(there, seen.places, seen.start)
    found = translated(basis, axes.sizes, axes.strides, offset)
    if found is None:
        return None
    first = int(there.storage_offset()) + found[1]
    return Axes(axes.sizes, found[0], first, axes.places, axes.start)


def _regions(operation: Operation, output: Tensor) -> Generator[tuple[Tensor, Tensor], None, None]:
    """The tensors that an operation puts together, each with where it lies in the output."""
    tensors, *more = operation.args
    if operation.func in _PADS:
        yield from _padded(tensors, more, output)
        return
    dim: int = operation.kwargs.get("dim", more[0] if more else 0)
    at = 0
    for place, tensor in enumerate(cast("list[Tensor]", tensors)):
        if not tensor.numel():
            continue
        if operation.func is aten.stack.default:
            yield tensor, output.select(dim, place)
            continue
        if operation.func is aten.hstack.default:
            dim = min(tensor.ndim - 1, 1)
        if tensor.ndim < output.ndim:  # vstack makes a row of it
            yield tensor, output[at]
            at += 1
            continue
        length = tensor.shape[dim]
        yield tensor, output.narrow(dim, at, length)
        at += length


def _padded(
    tensor: Tensor, more: list[Any], output: Tensor
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """A tensor and where it lies in the output of a pad."""
    pads = cast("list[int]", more[0])
    mode = more[1] if len(more) > 1 and isinstance(more[1], str) else "constant"
    if mode == "constant" and min(pads) >= 0:
        for axis, before in enumerate(pads[::2], 1):
            output = output.narrow(-axis, before, tensor.shape[-axis])
        yield tensor, output


def _is_view(operation: Operation, track: Track) -> bool:
    """Whether an operation shows the storage in another way and changes no number."""
    output = operation.output
    outputs = list(tensors_in((output,)))
    if not outputs or storage_key(outputs[0]) is None or not track.lies_in(outputs[0]):
        return False
    return not is_mutable(operation)


aten = torch.ops.aten
_PADS = (aten.constant_pad_nd.default, aten.pad.default)
JOINS = (
    *(aten.stack.default, aten.cat.default, aten.concat.default, aten.concatenate.default),
    *(aten.vstack.default, aten.row_stack.default, aten.hstack.default, *_PADS),
)
"""The operations that put tensors together."""
