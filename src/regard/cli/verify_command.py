"""``regard verify``: compare every number of a recording with its checksum."""

import sys

from regard.cli.options import Run
from regard.cli.progress import progress
from regard.recording.file_reader import verify as verify_file

__all__ = ["verify"]


def verify(run: Run) -> None:
    """Read a whole recording, and check all its numbers."""
    with progress() as report:
        found = verify_file(run, progress=lambda done, total: report(f"reading {run}", done, total))
    sys.stdout.write(f"{run}: {found}\n")
