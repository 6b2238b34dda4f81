"""Lessons as Jupyter notebooks: plain JSON, format 4.5."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.lessons.lesson_pages import Lesson, Piece, figure_of, lessons_folder

_FIRST = (
    "This is a lesson of regard. It needs `pip install 'regard[all]'`. Run the cells in\n"
    "order with Shift-Enter, and change them as you like. The solutions are folded."
)
_LESSON = re.compile(r"\]\((\d+_\w+)\.md\)")
# Jupyter shows it as HTML where it is displayed, and as text where it is printed.
_PRINTED_TABLE = re.compile(r"^print\((.*\.(?:table|steps)\(.*\))\)$", re.MULTILINE)


def as_notebook(lesson: Lesson) -> dict[str, Any]:
    """Return a lesson as the JSON of a notebook, with the outputs and figures of its cells.

    Tables are displayed where the page prints them.

    Example:
        >>> from regard.lessons.lesson_notebooks import as_notebook
        >>> from regard.lessons.lesson_pages import find_lesson
        >>> notebook = as_notebook(find_lesson("1"))
        >>> notebook["nbformat"], notebook["cells"][2]["cell_type"]
        (4, 'code')
    """
    cells: list[dict[str, Any]] = []
    heading, *pieces = lesson.pieces
    for piece in (heading, Piece("text", _FIRST), *pieces):
        if piece.kind == "output":
            cells[-1]["outputs"] = [_stream(piece.text)]
        elif piece.kind == "figure":
            cells[-1]["outputs"].append(_drawing(piece))
        else:
            cells.append(_cell(piece, f"lesson-{lesson.number}-{len(cells)}"))
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": python, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write_notebooks(folder: Path, lessons: Sequence[Lesson]) -> list[Path]:
    """Write lessons as notebooks into a folder, all of them or none.

    Args:
        folder: created if it does not exist.
        lessons: the lessons to write.

    Returns:
        The files.

    Raises:
        ValueError: the folder cannot be written, or holds one of the notebooks already.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.lessons.lesson_notebooks import write_notebooks
        >>> from regard.lessons.lesson_pages import all_lessons
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_notebooks(Path(folder), all_lessons()[:1])[0].name
        '1_averages.ipynb'
    """
    paths = [folder / f"{lesson.number}_{lesson.name}.ipynb" for lesson in lessons]
    there = [path.name for path in paths if path.exists() or path.is_symlink()]
    if there:
        more = f" and {len(there) - 1} more are" if len(there) > 1 else " is"
        raise ValueError(
            f"notebook is {str(folder)!r}, where {there[0]}{more} there already; notebooks are not "
            "overwritten.\n    Name another folder, or move them away."
        )
    texts = [json.dumps(as_notebook(lesson), indent=1, ensure_ascii=False) for lesson in lessons]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text + "\n")
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        reason = "it is a file" if folder.is_file() else error.strerror
        raise ValueError(
            f"notebook is {str(folder)!r}, which cannot be written: {reason}.\n"
            "    Name a folder that you may write to, or one that is not there yet."
        ) from error
    return written


def _cell(piece: Piece, name: str) -> dict[str, Any]:
    text = piece.text.rstrip("\n")
    if piece.kind == "code":
        text = _PRINTED_TABLE.sub(r"display(\1)", text)
    else:
        text = _LESSON.sub(r"](\1.ipynb)", text)
        if piece.is_solution:
            text = f"<details>\n<summary>Solution</summary>\n\n{text}\n\n</details>"
    source = text.splitlines(keepends=True)
    if piece.kind == "text":
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}
    hidden = {"jupyter": {"source_hidden": True}} if piece.is_solution else {}
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": hidden,
        "outputs": [],
        "source": source,
    }


def _stream(text: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}


def _drawing(piece: Piece) -> dict[str, Any]:
    name, description = figure_of(piece)
    svg = (lessons_folder() / "figures" / name).read_text(encoding="utf-8")
    data = {
        "image/svg+xml": svg.splitlines(keepends=True),
        "text/plain": [description],
    }
    return {"data": data, "metadata": {}, "output_type": "display_data"}
