"""The pages of the lessons, cut into text, code, output and figures."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"(\d+)_(\w+)\.md")
_FIGURE = re.compile(r"^!\[(?P<description>.*)\]\(figures/(?P<name>\S+)\)\n", re.MULTILINE)
# A piece of text ends at a block, at a figure, and at the first or last line of a solution.
_MARK = re.compile(
    r"^```(?P<language>\w+)\n(?P<block>(?s:.*?))^```\n|^</?details>\n(?:<summary>.*\n)?|"
    + _FIGURE.pattern,
    re.MULTILINE,
)
# A terminal folds nothing, draws no figure and knows no LaTeX. The comment in front of a formula
# holds the formula as one line of text.
_FOR_TERMINAL = [
    (re.compile(r"^</?details>\n+", re.MULTILINE), ""),
    (re.compile(r"^<summary>(.*)</summary>$", re.MULTILINE), r"**\1.**"),
    (re.compile(r"^<!-- ([^\n]*) -->\n\n\$\$\n.*?\n\$\$$", re.MULTILINE | re.DOTALL), r"    \1"),
    (re.compile(r"(?<![\w$])\$([^$\n]+)\$"), r"`\1`"),
    (_FIGURE, r"*Figure: \g<description>.*\n"),
]


@dataclass(frozen=True)
class Piece:
    """A piece of a lesson.

    Attributes:
        kind: text in Markdown, Python code, the output of the code before it, or the figure that
            this code draws, as an image in Markdown.
        text: without fences.
        is_solution: True if it belongs to the solution of an exercise.
    """

    kind: Literal["text", "code", "output", "figure"]
    text: str
    is_solution: bool = False


@dataclass(frozen=True)
class Lesson:
    """A lesson: a page of Markdown with code that runs.

    Attributes:
        number: its place, from 1.
        name: the middle of its file's name.
        page: its text in Markdown.

    Example:
        >>> from regard.lessons.lesson_pages import find_lesson
        >>> lesson = find_lesson("4")
        >>> lesson.name, lesson.title
        ('query_key_value', 'Query, key and value in whole numbers')
        >>> lesson.pieces[1].text.splitlines()[0]
        'import torch'
    """

    number: int
    name: str
    page: str

    @property
    def title(self) -> str:
        """Its heading without the number."""
        return self.page.partition("\n")[0].partition("· ")[2]

    @property
    def text(self) -> str:
        """The page for a terminal: solutions unfolded, formulas in one line, figures in words."""
        text = self.page
        for pattern, replacement in _FOR_TERMINAL:
            text = pattern.sub(replacement, text)
        return text.rstrip("\n") + "\n"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its text, code, outputs and figures in order."""
        pieces: list[Piece] = []
        done, is_solution = 0, False
        for mark in _MARK.finditer(self.page):
            text = self.page[done : mark.start()]
            is_output = not text.strip() and pieces[-1:] and pieces[-1].kind == "code"
            if mark["language"] == "text" and not is_output:
                continue  # an output that the text speaks about: it stays in the text
            pieces += _text(text, is_solution)
            done = mark.end()
            if mark["language"]:
                kind = "code" if mark["language"] == "python" else "output"
                pieces.append(Piece(kind, mark["block"], is_solution))
            elif mark["name"]:
                pieces.append(Piece("figure", mark[0], is_solution))
            else:
                is_solution = mark[0].startswith("<details>")
        return (*pieces, *_text(self.page[done:], is_solution))


def _text(text: str, is_solution: bool) -> list[Piece]:
    return [Piece("text", text.strip("\n"), is_solution)] if text.strip() else []


@cache
def all_lessons() -> tuple[Lesson, ...]:
    """Return the lessons in order.

    Example:
        >>> from regard.lessons.lesson_pages import all_lessons
        >>> [lesson.number for lesson in all_lessons()]
        [1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    lessons = [
        Lesson(int(named[1]), named[2], file.read_text(encoding="utf-8"))
        for file in lessons_folder().iterdir()
        if (named := _NAME.fullmatch(file.name))
    ]
    return tuple(sorted(lessons, key=lambda lesson: lesson.number))


def lessons_folder() -> Path:
    """Return the folder of the lessons: in an installed package, or in a clone."""
    packaged = Path(__file__).parent / "text"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "docs" / "lessons"


def find_lesson(asked: str) -> Lesson:
    """Return the lesson with a number or a name.

    Args:
        asked: "4", or "query_key_value".

    Raises:
        ValueError: there is none.

    Example:
        >>> from regard.lessons.lesson_pages import find_lesson
        >>> find_lesson("heads").number
        7
    """
    lessons = all_lessons()
    for lesson in lessons:
        if asked.strip().lower() in (str(lesson.number), lesson.name):
            return lesson
    names = ", ".join(lesson.name for lesson in lessons)
    raise ValueError(
        f"lesson is {asked!r}; it must be a number from 1 to {len(lessons)}, or a name: {names}.\n"
        "    Run regard learn to see what they are about."
    )


def figure_of(piece: Piece) -> tuple[str, str]:
    r"""Return the file name and the description of a piece that is a figure.

    Args:
        piece: of kind "figure".

    Raises:
        ValueError: it is of another kind.

    Example:
        >>> from regard.lessons.lesson_pages import Piece, figure_of
        >>> figure_of(Piece("figure", "![Six averages](figures/1_averages.svg)\n"))
        ('1_averages.svg', 'Six averages')
    """
    image = _FIGURE.fullmatch(piece.text)
    if image is None:
        raise ValueError(f"piece is {piece.text!r}; it must be an image in figures/.")
    return image["name"], image["description"]
