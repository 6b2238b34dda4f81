"""``regard page`` and ``regard verify``: a recording as a page, and its checksums."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from regard.cli.options import (
    Limit,
    NoPicture,
    Open,
    Run,
    Strict,
    open_recording,
    option,
    parse_positions,
)
from regard.cli.output_files import check_output, show_page, write_page

Output = Annotated[Path, option("--output -o FILE", "Write the page to this file.")]
Layer = Annotated[int | None, option("--layer N", "Open the page at this layer.", min=0)]
Head = Annotated[int | None, option("--head N", "Open the page at this head of the layer.", min=0)]
Layers = Annotated[
    str | None,
    option(
        "--layers PLACES", "Hold these layers, 0,5-7; of the others the page has means of blocks."
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
