"""``regard page`` and ``regard verify``: a recording as a page, and its checksums."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import Open, Run, Strict, open_recording
from regard.cli.output_files import check_output, page_line, show_page
from regard.cli.progress import progress
from regard.recording.file_reader import verify as verify_file
from regard.recording.layers import recorded_indices
from regard.text.escaping import visible
from regard.view.export.page_file import write_page

__all__ = ["page", "verify"]

Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Write the page to this file.")
]
Layer = Annotated[
    int | None, typer.Option("--layer", min=0, metavar="N", help="Open the page at this layer.")
]
Head = Annotated[
    int | None,
    typer.Option("--head", min=0, metavar="N", help="Open the page at this head of the layer."),
]


def page(
    run: Run,
    output: Output = Path("attention.html"),
    layer: Layer = None,
    head: Head = None,
    open_page: Open = False,
    strict: Strict = False,
) -> None:
    """Write a recording as a page: one file for any browser."""
    check_output(output)
    seen = open_recording(run, strict=strict)
    with progress() as report:
        writing = partial(report, f"writing {output}")
        opened = recorded_indices(seen.layers, layer, head)
        write_page(seen, output, title=visible(seen.model), opened=opened, progress=writing)
    sys.stdout.write(f"{page_line(output)}\n")
    if open_page:
        show_page(output)


def verify(run: Run) -> None:
    """Read a whole recording, and check all its numbers."""
    with progress() as report:
        found = verify_file(run, progress=partial(report, f"reading {run}"))
    sys.stdout.write(f"{run}: {found}\n")
