"""The results as a picture: forwards against the length, one panel for each width and mask."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.gpu.rows import Row
from benchmarks.plot import STYLE

__all__ = ["picture"]

KV_HEADS = 8
PANELS = tuple((width, causal) for width in (128, 64) for causal in (False, True))
COLOURS = ("#0b6e99", "#c2571a", "#9a3b6f", "#5a7d2a", "#806a00", "#46437a", "#7a4343", "#888888")


def picture(rows: Sequence[Row], facts: Mapping[str, Any], path: Path) -> Path:
    """Draw it; the file says what kind it is by its ending."""
    names = list(dict.fromkeys(row["side"] for row in rows if row.get("forwards") is not None))
    styles = {
        name: {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": "-" if place < len(COLOURS) else "--",
        }
        for place, name in enumerate(names)
    }
    with matplotlib.rc_context(STYLE):
        figure, panels = pyplot.subplots(2, 2, figsize=(14, 9), sharex=True, sharey=True)
        try:
            for axes, (width, causal) in zip(panels.flat, PANELS, strict=True):
                panel(axes, rows, styles, width, causal)
            handles, labels = panels.flat[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="center right", frameon=False)
            figure.text(
                0.01,
                0.01,
                f"64 query heads, {KV_HEADS} key heads, bfloat16 · {facts['gpu']}, PyTorch "
                f"{facts['torch']}, cuDNN {facts['cudnn']}, Triton {facts['triton']}",
                color="#555555",
            )
            figure.subplots_adjust(left=0.06, right=0.74, bottom=0.1, top=0.94)
            figure.savefig(path, metadata={"Date": None})
        finally:
            pyplot.close(figure)
    return path


def panel(
    axes: Axes, rows: Sequence[Row], styles: Mapping[str, Any], width: int, causal: bool
) -> None:
    """One width, one mask: a line for each side."""
    axes.set_title(f"head_dim {width}, {'causal' if causal else 'full'}", loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("cuDNN forwards")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    for name, style in styles.items():
        points = sorted(
            (row["tokens"], row["forwards"])
            for row in rows
            if row["side"] == name
            and (row["head_dim"], row["causal"]) == (width, causal)
            and row["num_kv_heads"] == KV_HEADS
            and row.get("forwards") is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), **style, label=name, marker="o", markersize=4)
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
