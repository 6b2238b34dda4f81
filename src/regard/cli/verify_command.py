"""``regard verify``: compare every number of a recording with its checksum."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.progress import progress
from regard.recording.file_reader import verify as verify_file

__all__ = ["verify"]

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A recording from regard record.")]


def verify(run: Run) -> None:
    """Read a whole recording, and say whether it is as it was written."""
    with progress() as tell:
        found = verify_file(run, progress=lambda done, total: tell(f"reading {run}", done, total))
    sys.stdout.write(f"{run}: {found}\n")
