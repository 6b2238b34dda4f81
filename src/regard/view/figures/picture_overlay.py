"""Attention drawn over a picture, with matplotlib."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from regard.images.patch_grid import Grid
from regard.images.picture import Picture
from regard.view.figures import figure_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap

_INK = 0.85  # the opacity of the largest share
_CONTRAST = 0.7  # of the grey picture, so that the darkest share is darker than it


def boxes_in(picture: Picture, grids: Sequence[Grid]) -> Tensor:
    """Return the boxes of all parts, (boxes, 4).

    Raises:
        ValueError: grids overlap, so that one place would have two colours.
    """
    boxes = [grid.boxes(picture.width, picture.height) for grid in grids]
    for place, one in enumerate(boxes):
        for other in boxes[place + 1 :]:
            low = torch.maximum(one[:, None, :2], other[None, :, :2])
            high = torch.minimum(one[:, None, 2:], other[None, :, 2:])
            sides = (one[:, 2:] - one[:, :2]).amin().clamp(min=0)
            if bool(((high - low).amin(-1) > sides / 4).any()):
                raise ValueError(
                    "grids overlap in the picture, as those of a thumbnail and of tiles do; one "
                    "place has one colour.\n    Choose one of them, grid=0."
                )
    return torch.cat(boxes)


def draw_grey(ax: "Axes", picture: Picture) -> None:
    """Draw the picture in pale grey, or only its frame if it was not kept."""
    ax.set(xlim=(0, picture.width), ylim=(picture.height, 0), aspect="equal", xticks=[], yticks=[])
    style.keep_quiet(ax)
    if picture.data is not None:
        pale = picture.image().convert("L").point(lambda level: 255 - _CONTRAST * (255 - level))
        extent = (0, picture.width, picture.height, 0)
        ax.imshow(pale, cmap="gray", vmin=0, vmax=255, extent=extent, interpolation="bilinear")


def _veil(ax: "Axes") -> "ListedColormap":
    """Return colours of growing opacity, so that parts without attention show the picture."""
    import numpy
    from matplotlib.colors import ListedColormap

    steps = numpy.linspace(0, 1, 256)
    # The ramp's first colours are too light to be seen over a picture.
    colours = style.ramp(ax)(0.4 + 0.6 * steps)
    colours[:, 3] = _INK * steps
    return ListedColormap(colours)


def draw_parts(ax: "Axes", boxes: Tensor, values: Tensor, unit: str) -> None:
    """Draw each part in one colour with thin edges, and a legend."""
    from matplotlib.collections import PolyCollection

    sides = cast("list[list[float]]", boxes.tolist())
    corners = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, y0, x1, y1 in sides]
    parts = PolyCollection(
        corners,
        array=values.detach().cpu().double().numpy(),
        cmap=_veil(ax),
        linewidth=0.3,
        edgecolor=style.GREY,
    )
    parts.set_clim(0, max(float(values.max()), 1e-30))
    ax.add_collection(parts)
    style.label_shares(ax, parts, unit)


def draw_smooth(ax: "Axes", box: Sequence[float], values: Tensor, unit: str) -> None:
    """Draw values that are interpolated between the middles of the parts, and a legend."""
    x0, y0, x1, y1 = box
    image = ax.imshow(
        values.detach().cpu().double().numpy(),
        cmap=_veil(ax),
        vmin=0,
        vmax=max(float(values.max()), 1e-30),
        extent=(x0, x1, y1, y0),
        interpolation="bilinear",
    )
    style.label_shares(ax, image, unit)
