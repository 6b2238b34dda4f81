"""The text argument of a command."""

import os
import sys
from pathlib import Path

__all__ = ["read_text"]

# More than any model reads, and little enough to be read into memory without a thought.
MOST_BYTES = 64 * 2**20


def read_text(text: str | None, file: Path | None) -> str:
    """Return the text from the argument, the file or standard input.

    Args:
        text: as an argument; "-" is standard input, which is read without any text when piped.
        file: a file in UTF-8.

    Raises:
        ValueError: both or none was given, or it is a file's name, no text, or too long.
    """
    if file is not None and text is not None:
        raise ValueError(
            "text is given twice, as an argument and with --file.\n    Leave out one of them."
        )
    if file is not None:
        with file.open("rb") as opened:
            return _decoded(opened.read(MOST_BYTES + 1), str(file))
    if text is not None and text != "-":
        if os.path.isfile(text):  # noqa: PTH113, Path.is_file raises where a text is too long
            raise ValueError(
                f"text is {text!r}, which is the name of a file.\n"
                "    For a text file write --file; for a recording use regard segments."
            )
        return text
    # Without any standard input, as under some schedulers, Python has None there.
    if sys.stdin is None or (text is None and sys.stdin.isatty()):
        raise ValueError(
            "text is missing.\n"
            '    Pass it in quotes, for example "Life is short", with --file, or through a pipe.'
        )
    return _decoded(sys.stdin.buffer.read(MOST_BYTES + 1), "standard input")


def _decoded(content: bytes, where: str) -> str:
    if len(content) > MOST_BYTES:
        raise ValueError(
            f"{where} has more than {MOST_BYTES // 2**20} MiB; longer texts are not supported.\n"
            "    Pass a part of it."
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {error.start} is invalid.\n    Save the text as UTF-8."
        ) from error
