"""The recording argument of a command."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from regard.errors import RegardError
from regard.recording.loading import load
from regard.recording.recording import Recording

__all__ = ["explain_missing_answers", "open_recording"]


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


@contextlib.contextmanager
def explain_missing_answers(run: Path, seen: Recording) -> Generator[None]:
    """Explain, in the words of the command, that a recording lacks the needed answers.

    Args:
        run: the file.
        seen: the recording in it.
    """
    try:
        yield
    except RegardError as error:
        if not seen.kept:
            raise
        raise RegardError(
            f"{run} was recorded with --answers, but not with those that this command needs.\n"
            "    Record the text again without --answers."
        ) from error
