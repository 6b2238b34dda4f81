"""The page of a training: every statistic of every head over the steps, as one file."""

from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, cast

from regard.training.row_numbers import STATISTICS
from regard.training.run_table import read_table
from regard.view.figures import plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ font: 1rem system-ui; margin: 2rem auto; max-width: 100rem; padding: 0 1rem }}
h2 {{ font-size: 1rem }} main {{ display: flex; flex-wrap: wrap; gap: 1rem }}
section {{ flex: 1 1 26rem }} svg {{ width: 100%; height: auto }}</style></head>
<body><h1>{title}</h1><p>Each line of a picture is a head. Steps go to the right.</p>
<main>{pictures}</main></body></html>
"""


def write_training_page(run: Path, output: Path) -> None:
    """Draw all statistics of a run into one file, without scripts and requests.

    Raises:
        RegardError: the folder is not of a monitor, or matplotlib is not installed.
    """
    from matplotlib import pyplot

    present = set(read_table(run).to_table(["statistic"])["statistic"].unique().to_pylist())
    pictures = ""
    for statistic in (name for name in STATISTICS if name in present):
        figure = cast("Figure", plot.training(run, statistic).get_figure(root=True))
        drawn = StringIO()
        figure.savefig(drawn, format="svg")
        pyplot.close(figure)
        svg = drawn.getvalue().partition("<svg")[2]
        pictures += f"<section><h2>{statistic.replace('_', ' ')}</h2><svg{svg}</section>\n"
    title = escape(f"Attention of every head: {run.name}")
    output.write_text(_PAGE.format(title=title, policy=_POLICY, pictures=pictures), "utf-8")
