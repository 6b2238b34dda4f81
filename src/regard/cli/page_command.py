"""``regard page``: a recording as one HTML file."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.output_files import check_output
from regard.cli.progress import progress
from regard.cli.recording_argument import answered, opened
from regard.text.escaping import visible
from regard.view.export.page_file import write_page

__all__ = ["page"]

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A recording from regard record.")]
File = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Write the page to this file.")
]
First = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Open the page here, counted from 0.")
]


def page(
    run: Run,
    output: File = Path("attention.html"),
    layer: First = None,
    head: First = None,
) -> None:
    """Write a recording as a page, one file that opens in any browser without a network."""
    check_output(output)
    seen = opened(run)
    with answered(run, seen), progress() as tell:
        told = partial(tell, f"writing {output}")
        write_page(seen, output, title=visible(seen.model), opened=(layer, head), progress=told)
    size = f"{output.stat().st_size / 1000:,.0f} kB"
    sys.stdout.write(f"{visible(str(output))}   {size}, one file, opens in any browser\n")
