"""The recording argument of a command."""

from pathlib import Path

from regard.errors import RegardError
from regard.recording.file_reader import load
from regard.recording.recording import Recording

__all__ = ["open_recording"]


def open_recording(run: Path) -> Recording:
    """Load the recording of a file, which must have at least one layer.

    Args:
        run: the file.

    Raises:
        OSError: there is no such file, or no right to read it.
        RegardError: it is no recording, or one without layers.
    """
    if run.is_file() or not run.exists():
        with run.open("rb"):
            pass
    seen = load(run)
    if not seen.layers:
        raise RegardError(f"{run} has no layers.\n    Record a model with regard record.")
    return seen
