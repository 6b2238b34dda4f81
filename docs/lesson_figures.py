"""Draw the figures of the lessons: run the code of each lesson and save what it plots.

    .venv/bin/python docs/lesson_figures.py      all of them, into docs/lessons/figures
    .venv/bin/python docs/lesson_figures.py 4    those of one lesson

An image on the page of a lesson is the figure that the code before it has drawn.
"""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from regard.lessons.lesson_pages import Lesson, all_lessons, find_lesson, figure_of

FOLDER = Path(__file__).parent / "lessons" / "figures"


def draw(lesson: Lesson, folder: Path) -> list[Path]:
    """Run a lesson up to its last figure, write its figures into a folder, return their files."""
    pieces = list(lesson.pieces)
    while pieces and pieces[-1].kind != "figure":
        pieces.pop()
    drawn: list[Path] = []
    namespace: dict[str, Any] = {"__name__": "__main__"}
    matplotlib.use("agg")
    # The same numbers give the same bytes, and labels stay text.
    with matplotlib.rc_context({"svg.hashsalt": "regard", "svg.fonttype": "none"}):
        for piece in pieces:
            if piece.kind == "code":
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(piece.text, f"<lesson {lesson.number}>", "exec"), namespace)
            elif piece.kind == "figure":
                path = folder / figure_of(piece)[0]
                pyplot.gcf().savefig(path, metadata={"Date": None})
                pyplot.close("all")
                drawn.append(path)
    return drawn


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for lesson in map(find_lesson, sys.argv[1:]) if sys.argv[1:] else all_lessons():
        for path in draw(lesson, FOLDER):
            sys.stdout.write(f"{path}\n")
