"""``regard page``: a recording as one HTML file."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import FirstHead, FirstLayer, Open, Run
from regard.cli.output_files import check_output, page_line, show_page
from regard.cli.progress import progress
from regard.cli.recording_argument import open_recording
from regard.text.escaping import visible
from regard.view.export.page_file import write_page

__all__ = ["page"]

File = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Write the page to this file.")
]


def page(
    run: Run,
    output: File = Path("attention.html"),
    layer: FirstLayer = None,
    head: FirstHead = None,
    open_page: Open = False,
) -> None:
    """Write a recording as a page: one file for any browser."""
    check_output(output)
    seen = open_recording(run)
    with progress() as report:
        report_progress = partial(report, f"writing {output}")
        write_page(
            seen, output, title=visible(seen.model), opened=(layer, head), progress=report_progress
        )
    sys.stdout.write(f"{page_line(output)}\n")
    if open_page:
        show_page(output)
