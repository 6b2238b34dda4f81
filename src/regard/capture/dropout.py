"""Dropout on attention weights: the one step that is looked through.

Dropout is PyTorch's own operation, or a product with numbers that ``bernoulli`` drew and that are 0
or 1/(1 - p) for one p. When the weights meet their value, every element is compared.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.storages import Storages, storage_key, tensors_in
from regard.capture.weight_tracks import Track, rounding_of
from regard.tracing.tracer import Operation, apart


class Dropout:
    """The random numbers of a running model, and the weights that they thin.

    Args:
        tracks: the tracked storages, which it updates.
    """

    def __init__(self, tracks: Storages[Track]) -> None:
        self._tracks = tracks
        self._noise: Storages[float | None] = Storages()

    def draw(self, operation: Operation) -> None:
        """Note random numbers, with the probability of a 1; None if it is unknown."""
        source, *given = operation.args
        chance = given[0] if given else operation.kwargs.get("p", _DEFAULTS.get(operation.func))
        if chance is None or isinstance(chance, Tensor):
            chance = _one_number(source if chance is None else chance)
        self._noise.put(operation.output, None if chance is None else float(chance))
        self._tracks.drop(operation.output)

    def thin(self, operation: Operation, weights: Tensor, noise: Tensor) -> bool:
        """Track weights through a product with dropout's noise; return False for any other."""
        track, chance = self._tracks.of(weights), self._noise.of(noise)
        output = cast(Tensor, operation.output)
        if track is None or track.softmax is None or not chance or chance >= 1:
            return False
        with apart():
            kept = noise[noise != 0]
            exact = bool(torch.isclose(kept, kept.new_tensor(1 / chance), rtol=1e-2).all())
            if not exact or weights.shape != output.shape:
                return False
            source, axes = weights, None if track.axes is None else track.axes.of_view(weights)
            if storage_key(weights) == storage_key(output):
                # Dropout in place: the weights follow from the scores.
                softmax = track.softmax
                if softmax.scores is None or softmax.scores.shape != weights.shape:
                    return False
                source = softmax.scores.softmax(softmax.dim).to(weights.dtype)
                if not torch.allclose(source * noise, output, rtol=1e-2, atol=1e-6, equal_nan=True):
                    return False
                axes = None if axes is None else axes.moved(source)
        moved = None if axes is None else axes.moved(output)
        self._tracks.put(output, track.into(output, axes=moved, before=(source, noise, axes)))
        return True

    def drop(self, operation: Operation) -> bool:
        """Track weights through PyTorch's own dropout; return False for anything else."""
        source = operation.args[0]
        track = self._tracks.of(source)
        output = next(tensors_in((operation.output,)))
        if track is None or track.softmax is None or storage_key(source) == storage_key(output):
            return False
        axes = None if track.axes is None else track.axes.of_view(source)
        moved = None if axes is None else axes.moved(output)
        kept, chance = operation.output[1], operation.args[1]
        with apart():
            noise = kept.to(source.dtype) / (1 - chance)
        self._tracks.put(output, track.into(output, axes=moved, before=(source, noise, axes)))
        return True


def before_dropout(track: Track, side: Tensor) -> Tensor | None:
    """Return weights as they were before dropout, (batch, rows, keys).

    The result is None if anything but dropout was done to them.
    """
    if track.before is None:
        return side
    weights, multiplier, axes = track.before
    view = None if track.axes is None else track.axes.of_view(side)

    def laid(tensor: Tensor) -> Tensor | None:
        if view is not None and axes is not None:
            return axes.arranged(tensor, view)
        return tensor.reshape(side.shape) if tensor.numel() == side.numel() else None

    before, noise = laid(weights), laid(multiplier)
    if before is None or noise is None:
        return None
    rounding = 4 * max(track.rounding, rounding_of(side))
    used = (before * noise).to(side.dtype)
    same = torch.allclose(side, used, rtol=rounding, atol=1e-7, equal_nan=True)
    return before if same else None


def _one_number(value: Tensor) -> float | None:
    first = value.flatten()[0] if value.numel() else None
    return float(first) if first is not None and bool((value == first).all()) else None


_DEFAULTS: dict[Callable[..., Any], float] = {torch.ops.aten.bernoulli_.float: 0.5}
"""The probability of operations that may leave it out."""
