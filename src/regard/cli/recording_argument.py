"""The recording argument of a command."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from regard.errors import RegardError
from regard.recording.loading import load
from regard.recording.recording import Recording

__all__ = ["answered", "opened"]


def opened(run: Path) -> Recording:
    """Load the recording of a file, which must have at least one layer.

    Args:
        run: the file.

    Raises:
        OSError: there is no such file, or no right to read it.
        RegardError: it is no recording, or one without layers.

    Example:
        >>> from pathlib import Path
        >>> from regard.cli.recording_argument import opened
        >>> opened(Path("missing.safetensors"))
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: 'missing.safetensors'
    """
    if run.is_file() or not run.exists():
        with run.open("rb"):
            pass
    seen = load(run)
    if not seen.layers:
        raise RegardError(
            f"{run} has no layers; a command asks one at least.\n"
            "    Record a model with regard record."
        )
    return seen


@contextlib.contextmanager
def answered(run: Path, seen: Recording) -> Generator[None]:
    """Explain, in the words of the command, that a recording lacks the needed answers.

    Args:
        run: the file.
        seen: the recording in it.

    Example:
        >>> from pathlib import Path
        >>> import regard
        >>> from regard.cli.recording_argument import answered
        >>> with answered(Path("run.safetensors"), regard.Recording({})):
        ...     pass
    """
    try:
        yield
    except RegardError as error:
        if not seen.kept:
            raise
        raise RegardError(
            f"{run} has answers only, and none to this question.\n"
            "    Record the text again without --answers."
        ) from error
