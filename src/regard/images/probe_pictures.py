"""Probe pictures: the place in the original of each number that a processor makes of pictures.

A processor resizes, crops, pads, tiles and normalises. All of it is linear in the pixels, so a
picture whose brightness grows from left to right says where each number comes from.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from regard.errors import RegardError, kind_text, shape_text

if TYPE_CHECKING:
    from PIL.Image import Image

Prepare = Callable[[list[Any]], Any]
"""A function from pictures to the inputs of a model: a mapping, a tensor or a tuple."""

_LEVELS = 255
_STEPS = 4
_LEAST_SIDE = 16
_SAME = 0.25  # of the range: numbers that white and black change by less are padding
_OUTSIDE = 0.1  # interpolation overshoots the ramp at its ends, and more so beside padding


class Inputs(NamedTuple):
    """The inputs of a model as a flat list.

    Attributes:
        leaves: the tensors and other values.
        spec: their structure.
    """

    leaves: list[Any]
    spec: Any

    @staticmethod
    def of(prepared: Any) -> "Inputs":
        """Flatten the inputs of a model."""
        if isinstance(prepared, Mapping):  # of transformers' own kind, which has no flat form
            prepared = dict(cast("Mapping[str, Any]", prepared))
        return Inputs(*tree_flatten(prepared))

    def call(self, model: Callable[..., Any], changed: Mapping[int, Tensor]) -> None:
        """Run a model on the inputs, with some leaves replaced."""
        leaves = [changed.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        inputs: Any = self.spec.unflatten(leaves)
        if isinstance(inputs, dict):
            model(**cast("dict[str, Any]", inputs))
        elif isinstance(inputs, Tensor):
            model(inputs)
        else:
            model(*inputs)


class Places(NamedTuple):
    """The place in the pictures of each number of a tensor.

    Attributes:
        picture: the index of its picture; -1 for padding.
        x: from 0 at the left edge to 1 at the right edge; a little beyond for padding.
        y: from 0 at the upper edge to 1 at the lower edge.
    """

    picture: Tensor
    x: Tensor
    y: Tensor


def places_of(prepare: Prepare, pictures: "Sequence[Image]") -> tuple[Inputs, dict[int, Places]]:
    """Return the inputs of a model, and the places of the numbers in those that hold pixels.

    Raises:
        RegardError: no input depends on the pictures, a picture is too small, or the content of
            pictures changes more than colours: the shape of an input, or the brightness.
    """
    sizes = [picture.size for picture in pictures]
    for size in sizes:
        if min(size) < _LEAST_SIDE:
            raise RegardError(
                f"pictures has one of {size[0]} x {size[1]} pixels; places are measured by pixels, "
                f"of which {_LEAST_SIDE} x {_LEAST_SIDE} are needed.\n    Make it larger first."
            )
    inputs = Inputs.of(prepare(list(pictures)))

    def probed(draw: "Callable[[tuple[int, int]], Image]") -> dict[int, Tensor]:
        return _probed(prepare, inputs, list(map(draw, sizes)))

    black, white = probed(lambda size: _flat(size, 0.0)), probed(lambda size: _flat(size, 1.0))
    # The pictures are numbered in binary: each digit is a run with dark and light grey pictures.
    digits = [
        _probed(
            prepare,
            inputs,
            [_flat(size, (1 + (at >> bit & 1)) / 3) for at, size in enumerate(sizes)],
        )
        for bit in range(max(1, (len(sizes) - 1).bit_length()))
    ]
    across, down = (
        [probed(partial(_ramp, step=step, is_across=is_across)) for step in range(_STEPS)]
        for is_across in (True, False)
    )
    places: dict[int, Places] = {}
    for leaf, dark in black.items():
        span = white[leaf] - dark
        holds = span.abs() > _SAME * span.abs().max().clamp(min=1e-30)
        if not bool(holds.any()):
            continue
        if not inputs.leaves[leaf].is_floating_point():
            raise RegardError(
                "prepare gives pixels as whole numbers; places are measured by gradients, which "
                "those have not.\n    Give the tokens their places with regard.grid(...)."
            )
        ramps = [torch.stack([each[leaf] for each in axis]).mean(0) for axis in (across, down)]
        x, y, *bits = ((each - dark) / span for each in (*ramps, *(each[leaf] for each in digits)))
        places[leaf] = _checked_places(holds, x, y, bits)
    if not places:
        raise RegardError(
            "prepare gives inputs that do not depend on the pictures.\n"
            "    Pass a function of the pictures, such as "
            "lambda pictures: processor(images=pictures, return_tensors='pt')."
        )
    return inputs, places


def _checked_places(holds: Tensor, x: Tensor, y: Tensor, bits: Sequence[Tensor]) -> Places:
    """Return places from brightness, which must be linear in the pixels of the picture.

    Args:
        holds: True for the numbers that hold a pixel.
        x: the brightness of a ramp from left to right, from 0 to 1.
        y: that of a ramp from top to bottom.
        bits: the binary digits of the index of the picture, the lowest first, as the brightness
            of 1/3 and 2/3.
    """
    x, y = ((each * _LEVELS - 0.5) / (_LEVELS - 1) for each in (x, y))
    picture, wrong = torch.zeros_like(x).long(), torch.zeros_like(holds)
    for bit, digit in enumerate(bits):
        is_one = digit > 0.5
        picture = picture | is_one.long() << bit
        wrong = wrong | ((3 * digit - 1 - is_one.double()).abs() > _OUTSIDE)
    for each in (x, y):
        wrong = wrong | (each < -_OUTSIDE) | (each > 1 + _OUTSIDE)
    if bool((holds & wrong).any()):
        raise RegardError(
            "prepare mixes pictures, or changes the brightness of one by its content, so that no "
            "places can be measured.\n    Give the tokens their places with regard.grid(...)."
        )
    return Places(picture.masked_fill(~holds, -1), x, y)


def _probed(prepare: Prepare, inputs: Inputs, pictures: list[Any]) -> dict[int, Tensor]:
    """Return the tensors that a processor makes of probe pictures, in float64."""
    probe = Inputs.of(prepare(pictures))
    tensors: dict[int, Tensor] = {}
    for index, leaf in enumerate(inputs.leaves):
        if not isinstance(leaf, Tensor):
            continue
        pixels = probe.leaves[index] if probe.spec == inputs.spec else None
        if not isinstance(pixels, Tensor) or pixels.shape != leaf.shape:
            instead = shape_text(pixels.shape) if isinstance(pixels, Tensor) else kind_text(pixels)
            raise RegardError(
                f"prepare gives an input of shape {shape_text(leaf.shape)}, and {instead} for "
                "another picture of this size; it depends on the content.\n"
                "    Give the tokens their places with regard.grid(...)."
            )
        tensors[index] = pixels.detach().cpu().double()
    return tensors


def _flat(size: tuple[int, int], brightness: float) -> "Image":
    level = torch.full(
        (size[1], size[0], 3), brightness * _LEVELS, dtype=torch.float64, device="cpu"
    )
    return _image(level.round())


def _ramp(size: tuple[int, int], step: int, *, is_across: bool) -> "Image":
    """Return a picture that brightens from left to right, or from top to bottom.

    A processor rounds to whole levels. The steps are ramps that differ by parts of a level, and so
    do the colours of each, so that their mean is finer. Noise does the same for the ramp's own
    rounding. All of them add half a level in the mean.
    """
    width, height = size
    along = width if is_across else height
    ramp = (torch.arange(along, dtype=torch.float64, device="cpu") + 0.5) / along * (_LEVELS - 1)
    ramp = ramp[:, None] if is_across else ramp[:, None, None]
    parts = (step + (torch.arange(3, device="cpu") + 0.5) / 3) / _STEPS
    # The golden ratio spreads the offsets of neighbours evenly, in each direction.
    noise = (
        torch.arange(width, device="cpu") * 0.6180339887
        + torch.arange(height, device="cpu")[:, None] * 0.7548776662
    )
    return _image((ramp + parts + noise[..., None] % 1 - 0.5).expand(height, width, 3).round())


def _image(levels: Tensor) -> "Image":
    pillow: Any = import_module("PIL.Image")
    return pillow.fromarray(levels.clamp(0, _LEVELS).to(torch.uint8).numpy())
