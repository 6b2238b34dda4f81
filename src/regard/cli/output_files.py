"""The files that commands write."""

import tempfile
from pathlib import Path

__all__ = ["check_output"]


def check_output(path: Path) -> None:
    """Refuse a path that cannot be written before any work is done for it.

    Args:
        path: the file that will be written.

    Raises:
        ValueError: a folder, something that is no ordinary file, or no right to write there.

    Example:
        >>> from pathlib import Path
        >>> from regard.cli.output_files import check_output
        >>> check_output(Path("attention.html"))
    """
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif path.exists() and not path.is_file():
        reason = "it is no ordinary file"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    else:
        try:
            # A file is written beside its place and then moved there: this asks for the same.
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            reason = error.strerror
    if reason is not None:
        raise ValueError(
            f"output is {str(path)!r}, which cannot be written: {reason}.\n"
            "    Name a file in a folder that exists and that you may write to."
        )
