"""The curves as a picture: seconds and memory against the length, both axes logarithmic."""

from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.growth import growth

__all__ = ["apart", "picture"]

PANELS = {"time": "seconds", "memory": "MiB added"}
OURS, FUSED, OTHERS = "#0b6e99", "#222222", ("#c2571a", "#9a3b6f", "#5a7d2a", "#806a00")
LETTER = 0.05  # of the height of a panel: what one line of text takes
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titleweight": "bold",
    "svg.hashsalt": "regard",  # the same picture from the same numbers
    "svg.fonttype": "path",
}

Row = Mapping[str, Any]


def picture(rows: Sequence[Row], facts: Mapping[str, Any], path: Path) -> Path:
    """Draw it; the file says what kind it is by its ending."""
    with matplotlib.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, len(PANELS), figsize=(16, 6))
        try:
            for axes, (group, unit) in zip(panels, PANELS.items(), strict=True):
                panel(axes, group, unit, rows)
            figure.text(
                0.01,
                0.01,
                "one head, head_dim 64, float32; the power of $n$ is fitted over all lengths · "
                f"{facts['processor']}, threads: {facts['threads']}, PyTorch {facts['torch']}",
                color="#555555",
            )
            figure.subplots_adjust(left=0.04, right=0.77, bottom=0.13, top=0.93, wspace=1.1)
            figure.savefig(path, metadata={"Date": None})
        finally:
            pyplot.close(figure)
    return path


def panel(axes: Axes, group: str, unit: str, rows: Sequence[Row]) -> None:
    """One group: a line for each side, named at its right end."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["group"] == group and row["tokens"] and row.get("value", 0) > 0:
            curves.setdefault(row["case"], []).append((row["tokens"], row["value"]))
    powers = {curve["case"]: curve["exponent"] for curve in growth(rows) if curve["group"] == group}
    curves = {case: points for case, points in curves.items() if case in powers}
    axes.set_title(f"{unit} for one answer", loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if not curves:
        return
    colours = colours_of(curves)
    for case, points in curves.items():
        ours = case.startswith("regard")
        axes.plot(
            *zip(*sorted(points), strict=True),
            color=colours[case],
            linewidth=2 if ours else 1.4,
            linestyle="-" if ours else (0, (5, 1.5)),
            marker="o",
            markersize=4,
        )
    lengths = sorted({length for points in curves.values() for length, _ in points})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("tokens")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    label(axes, {case: max(points) for case, points in curves.items()}, powers, colours)


def colours_of(cases: Mapping[str, object]) -> dict[str, str]:
    """Ours in one colour, the fused forward nearly black, each other its own."""
    others = iter(OTHERS * len(cases))
    return {
        case: OURS
        if case.startswith("regard")
        else FUSED
        if case.startswith("fused")
        else next(others)
        for case in cases
    }


def label(
    axes: Axes,
    ends: Mapping[str, tuple[int, float]],
    powers: Mapping[str, float],
    colours: Mapping[str, str],
) -> None:
    """The names beside the panel, each as near to the end of its line as the others let it be."""
    bottom, top = (log10(limit) for limit in axes.get_ylim())
    rising = sorted(ends, key=lambda case: ends[case][1])
    heights = [(log10(ends[case][1]) - bottom) / (top - bottom) for case in rising]
    places = dict(zip(rising, apart(heights, LETTER), strict=True))
    for case, (length, value) in ends.items():
        axes.annotate(
            f"{case.removeprefix('regard, in ')}, $n^{{{powers[case]:.1f}}}$",
            xy=(length, value),
            xytext=(1.1, places[case]),
            textcoords="axes fraction",
            color=colours[case],
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colours[case],
                "linewidth": 0.6,
                "alpha": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights in rising order, moved as little as needs be until all are `least` apart.

    Neighbours that are too near form a group about its own middle, or at the edge of the panel,
    which goes from 0 to 1; groups that meet join.
    """
    groups: list[list[float]] = []
    for height in heights:
        group = [height]
        while groups and _spread(group, least)[0] - _spread(groups[-1], least)[-1] < least:
            group = groups.pop() + group
        groups.append(group)
    return [place for group in groups for place in _spread(group, least)]


def _spread(group: Sequence[float], least: float) -> list[float]:
    height = least * (len(group) - 1)
    first = min(max(sum(group) / len(group) - height / 2, 0), 1 - height)
    return [first + least * place for place in range(len(group))]
