"""``regard page`` and ``regard verify``: a recording as a page, and its checksums."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import (
    Limit,
    NoPicture,
    Open,
    Run,
    Strict,
    open_recording,
    parse_positions,
)
from regard.cli.output_files import check_output, show_page, write_page

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
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="PLACES",
        help="Hold these layers, 0,5-7; of the others the page has means of blocks.",
    ),
]


def page(
    run: Run,
    output: Output = Path("attention.html"),
    layer: Layer = None,
    head: Head = None,
    layers: Layers = None,
    limit: Limit = 64,
    no_picture: NoPicture = False,
    open_page: Open = False,
    strict: Strict = False,
) -> None:
    """Write a recording as a page: one file for any browser."""
    from regard.cli.progress import progress
    from regard.recording.layers import recorded_indices

    check_output(output)
    chosen = parse_positions("layers", layers)
    seen = open_recording(run, strict=strict, no_picture=no_picture)
    with progress() as report:
        places = [recorded_indices(seen.layers, place, None)[0] or 0 for place in chosen or ()]
        lines = write_page(
            seen,
            output,
            report,
            opened=recorded_indices(seen.layers, layer, head),
            layers=None if chosen is None else places,
            limit=limit,
        )
    sys.stdout.write(f"{lines}\n")
    if open_page:
        show_page(output)


def verify(run: Run) -> None:
    """Read a whole recording, and check all its numbers."""
    from regard.cli.progress import progress
    from regard.recording.file_reader import verify as verify_file

    with progress() as report:
        found = verify_file(run, progress=partial(report, f"reading {run}"))
    sys.stdout.write(f"{run}: {found}\n")
