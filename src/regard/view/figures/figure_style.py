"""The style of all matplotlib figures: colour scale, legend and labels.

matplotlib is imported where a picture is drawn, so that ``import regard`` stays quick.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import product
from math import floor, log10
from textwrap import wrap
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from torch import Tensor

from regard.errors import optional_module
from regard.text.escaping import visible
from regard.text.token_labels import bare
from regard.text.tokens import Token

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

Scale = Literal["linear", "log"]

GREY = "#7b7d84"  # dark enough on white, light enough on black
_LONGEST_LABEL = 18
# Points: room for a number.
_LEAST_WIDTH, _LEAST_HEIGHT = 22.0, 12.0


class Picture(NamedTuple):
    """Cells to draw.

    Attributes:
        weights: (rows, columns), each from 0 to 1; NaN where there is nothing.
        scale: how a weight becomes a colour.
        unit: what a cell is, for the legend.
        shape: what the cells stretch over, (rows, columns) of tokens or of cells.
        floor: where a log scale begins.
    """

    weights: Tensor
    scale: Scale
    unit: str
    shape: tuple[int, int]
    floor: float = 0.01


def log_floor(keys: int) -> float:
    """Return the start of the log scale: the power of ten below half an even share.

    It depends on the number of keys alone, so that it is the same for every head.
    """
    return float(10.0 ** min(-2, floor(log10(0.5 / keys))))


def check_package(call: str) -> None:
    """Raise an error if matplotlib is missing."""
    optional_module("matplotlib", f"{call} needs matplotlib", "matplotlib")


def axes_of(ax: "Axes | None", width: float, height: float) -> "Axes":
    """Return the given axes, or new ones."""
    from matplotlib import pyplot

    if ax is not None:
        return ax
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def draw_cells(ax: "Axes", picture: Picture) -> None:
    r"""Draw the cells as an image with a legend."""
    import numpy
    from matplotlib.colors import LogNorm, Normalize

    rows, columns = picture.shape
    weights = picture.weights.detach().cpu().double().numpy()
    norm = Normalize(0.0, 1.0)
    if picture.scale == "log":
        norm = LogNorm(picture.floor, 1.0)
        # A zero has no logarithm; below the floor all is ground.
        weights = numpy.maximum(weights, picture.floor)
    image = ax.imshow(
        weights,
        cmap=ramp(ax),
        norm=norm,
        interpolation="nearest",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        aspect="equal" if 0.25 <= rows / columns <= 4 else "auto",
    )
    bar = _label_bar(ax, image, f"{picture.unit}\n{picture.scale}")
    bar.ax.yaxis.set_major_formatter(lambda share, _: _percent(share, picture))
    bar.ax.minorticks_off()
    keep_quiet(ax)
    # Where the axes lie now says how many labels fit beside them.
    cast("Figure", ax.get_figure(root=True)).draw_without_rendering()


def draw_numbers(ax: "Axes", numbers: Tensor, unit: str) -> None:
    """Draw numbers of any size as an image with a legend, from the smallest to the largest."""
    image = ax.imshow(
        numbers.detach().cpu().double().masked_fill(~numbers.isfinite(), torch.nan).numpy(),
        cmap=ramp(ax),
        interpolation="nearest",
        aspect="auto",
    )
    _label_bar(ax, image, unit)
    keep_quiet(ax)


def write_shares(ax: "Axes", weights: Tensor) -> None:
    """Its share in percent on each cell, where all of them have room for it."""
    rows, columns = weights.shape
    width, height = (_points_along(axis) for axis in (ax.xaxis, ax.yaxis))
    if width / columns < _LEAST_WIDTH or height / rows < _LEAST_HEIGHT:
        return
    for row, column in product(range(rows), range(columns)):
        share = float(weights[row, column])
        if share > 0:
            text = "<1" if share < 0.005 else f"{100 * share:.0f}"
            write_on(ax, row, column, share, text)


def write_on(ax: "Axes", row: int, column: int, share: float, text: str) -> None:
    """Write a word or number on a cell, dark or light, whichever is readable."""
    import numpy

    [image] = ax.get_images()
    red, green, blue, _ = image.to_rgba(numpy.array([share]))[0]
    light = 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
    colour = "#17181c" if light else "#fbfaf7"
    ax.text(column, row, text, color=colour, ha="center", va="center", fontsize="small")


def keep_quiet(ax: "Axes") -> None:
    """Thin grey edges, and no marks beside the labels."""
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set(linewidth=0.5, edgecolor=GREY)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_color(GREY)


def room_for(names: Iterable[str]) -> float:
    """Inches that the longest of these labels takes, about."""
    return 0.2 + 0.085 * min(_LONGEST_LABEL, max(map(len, names), default=0))


def label_tokens(axis: "Axis", tokens: Sequence[Token] | None, length: int, what: str) -> None:
    """Label each token if the labels fit side by side, or else some positions.

    Args:
        axis: the one to label.
        tokens: one for each place; None where they are not known.
        length: how many places there are.
        what: "query" or "key", for the axis's own label.
    """
    if tokens is None or length * _label_points() > _points_along(axis):
        number(axis, f"{what} position")
        return
    label_names(axis, [bare(token.text) for token in tokens])
    for label, token in zip(axis.get_ticklabels(), tokens, strict=True):
        if token.special:
            label.set_color(GREY)
    axis.set_label_text(what)


def number(axis: "Axis", what: str) -> None:
    """Whole numbers along an axis, few of them."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda place, _: f"{place:,.0f}")
    axis.set_label_text(what)


def label_names(axis: "Axis", names: Sequence[str]) -> None:
    """Write a shortened name at each position, as plain text without mathematics.

    A character that no font of ``rcParams["font.family"]`` has is shown by its number.
    """
    known = _characters()
    axis.set_ticks(range(len(names)), [_drawable(name, known) for name in names])
    for label in axis.get_ticklabels():
        label.set(parse_math=False, usetex=False)
    widest = 0.6 * _label_points() * max(map(len, names))
    if _is_across(axis) and widest * len(names) > _points_along(axis):
        axis.set_tick_params(rotation=90)


def label_places(
    axis: "Axis", names: Sequence[int | str], what: str, at: Sequence[int] = ()
) -> None:
    """Write the names of layers, heads or steps, as many as fit.

    Args:
        axis: the one to label.
        names: one for each place.
        what: its own label.
        at: the places that may be named; all of them when left out.
    """
    from matplotlib.ticker import FixedLocator

    lines = 1 + 0.5 * max(2, *(len(str(name)) for name in names)) if _is_across(axis) else 2
    fitting = max(1, int(_points_along(axis) / (lines * _label_points())))
    axis.set_major_locator(FixedLocator(at or range(len(names)), nbins=fitting))
    axis.set_major_formatter(lambda place, _: str(names[round(place)]))
    axis.set_label_text(what)


def explain_letters(ax: "Axes", meanings: Mapping[str, str]) -> None:
    """Explain the letters on the cells above the axes, on as many lines as needed."""
    entries = (
        f"{letter} {meaning}   ".replace(" ", "\xa0") for letter, meaning in meanings.items()
    )
    most = int(_points_along(ax.xaxis) / 4.5)
    lines = wrap(" ".join(entries), most, break_long_words=False, break_on_hyphens=False)
    text = "\n".join(line.replace("\xa0 ", "\xa0").replace("\xa0", " ").rstrip() for line in lines)
    ax.set_title(text, fontsize="small", color=GREY, loc="left")


def write_beside(ax: "Axes", x: float, y: float, text: str, colour: "ColorType") -> None:
    """Write a name to the right of a point."""
    at = "offset points"
    ax.annotate(text, (x, y), (6, 0), textcoords=at, va="center", fontsize="small", color=colour)


def _label_bar(ax: "Axes", image: "ScalarMappable", unit: str) -> "Colorbar":
    """Return the legend of an image, with its unit."""
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.8, aspect=24, pad=0.02)
    bar.set_label(unit, color=GREY, fontsize="small")
    bar.ax.tick_params(length=0, colors=GREY, labelsize="small")
    bar.outline.set(linewidth=0.5, edgecolor=GREY)
    return bar


def label_shares(ax: "Axes", drawn: "ScalarMappable", unit: str) -> None:
    """Add the legend of shares that begin at 0, in percent."""
    bar = _label_bar(ax, drawn, unit)
    bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")


def _label_points() -> float:
    """From one line of labels to the next."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties

    return 1.15 * FontProperties(size=rcParams["xtick.labelsize"]).get_size_in_points()


def _points_along(axis: "Axis") -> float:
    box = axis.axes.get_window_extent()
    return 72 * (box.width if _is_across(axis) else box.height) / axis.axes.figure.dpi


def _is_across(axis: "Axis") -> bool:
    return axis is axis.axes.xaxis


def _drawable(text: str, known: set[int]) -> str:
    shown = "".join(
        character if ord(character) in known or character.isspace() else f"‹U+{ord(character):04X}›"
        for character in visible(text[:_LONGEST_LABEL])
    )
    fits = len(shown) <= _LONGEST_LABEL and len(text) <= _LONGEST_LABEL
    return shown if fits else f"{shown[: _LONGEST_LABEL - 1]}…"


def _characters() -> set[int]:
    """Return the characters that the user's fonts can draw, fallbacks included."""
    from matplotlib.font_manager import FontProperties, fontManager
    from matplotlib.ft2font import FT2Font

    known: set[int] = set()
    for family in FontProperties().get_family():
        path = fontManager.findfont(FontProperties(family=[family]))
        known |= FT2Font(path).get_charmap().keys()
    return known


def ramp(ax: "Axes") -> "LinearSegmentedColormap":
    """Return the colour scale, from the background of the axes to ink."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    ground = to_rgb(ax.get_facecolor())
    # The page's own table: lightness alone orders its colours, which the colour blind can see.
    table = files("regard.view").joinpath("colours.json").read_text(encoding="utf-8")
    stops = json.loads(table)["weights"]["light" if sum(ground) > 1.5 else "dark"]
    # What is no number (NaN) is grey.
    return LinearSegmentedColormap.from_list("regard", [ground, *stops], bad=GREY)


def _percent(share: float, picture: Picture) -> str:
    text = f"{100 * share:.6g} %"
    return f"≤ {text}" if picture.scale == "log" and share <= picture.floor * 1.001 else text
