"""The lessons as they are on their pages: text, code, and what the code prints."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

__all__ = ["Lesson", "Piece", "all_lessons", "asked_lesson"]

_NAME = re.compile(r"(\d+)_(\w+)\.md")
# They fold the answers away on a web page, and mean nothing elsewhere.
_FOLDING = re.compile(r"^</?(details|summary)>.*\n\n?", re.MULTILINE)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A piece of a lesson.

    Attributes:
        kind: text in Markdown, Python code, or what the code before it prints.
        text: without fences.
        is_answer: whether it stands under the answers.
    """

    kind: Literal["text", "code", "output"]
    text: str
    is_answer: bool = False


@dataclass(frozen=True)
class Lesson:
    """A lesson: a page of Markdown with code that runs.

    Attributes:
        number: its place, from 1.
        name: in a word.
        page: its text in Markdown.

    Example:
        >>> from regard.lessons.lesson_pages import asked_lesson
        >>> lesson = asked_lesson("4")
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
        """The page as it is read in a terminal: the answers are not folded away."""
        return _FOLDING.sub("", self.page).rstrip("\n") + "\n"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its text, code and outputs in order."""
        return tuple(_pieces(self.text))

    @property
    def steps(self) -> tuple[str, ...]:
        """The page in parts that are read one at a time: each ends with code and its output."""
        return tuple(_steps(self.text))


@cache
def all_lessons() -> tuple[Lesson, ...]:
    """The lessons in order.

    Example:
        >>> from regard.lessons.lesson_pages import all_lessons
        >>> [lesson.number for lesson in all_lessons()]
        [1, 2, 3, 4, 5, 6, 7, 8]
    """
    files = _folder().iterdir()
    found = [
        Lesson(int(named[1]), named[2], file.read_text(encoding="utf-8"))
        for file in files
        if (named := _NAME.fullmatch(file.name))
    ]
    return tuple(sorted(found, key=lambda lesson: lesson.number))


def _folder() -> Path:
    """Return the folder of the lessons: in an installed package, or in a clone."""
    packaged = Path(__file__).parent / "text"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "docs" / "lessons"


def asked_lesson(asked: str) -> Lesson:
    """The lesson of a number or a name.

    Args:
        asked: "4", or "query_key_value".

    Raises:
        ValueError: there is none.

    Example:
        >>> from regard.lessons.lesson_pages import asked_lesson
        >>> asked_lesson("heads").number
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


def _pieces(text: str) -> Iterator[Piece]:
    done, is_answer = 0, False
    after_code = False
    for block in _FENCE.finditer(text):
        between = text[done : block.start()]
        kind = block[1]
        if kind == "text" and not (after_code and not between.strip()):
            continue  # an output that the text speaks about: it stays in the text
        is_answer = is_answer or "## Answers" in between
        if between.strip():
            yield Piece("text", between.strip("\n"), is_answer)
        after_code = kind == "python"
        yield Piece("code" if after_code else "output", block[2], is_answer)
        done = block.end()
    if text[done:].strip():
        yield Piece("text", text[done:].strip("\n"), is_answer)


def _steps(text: str) -> Iterator[str]:
    """Cut in front of every heading, and after every block that no other follows at once."""
    cuts = {match.start() for match in re.finditer(r"^## ", text, re.MULTILINE)}
    blocks = [(match.start(), match.end()) for match in _FENCE.finditer(text)]
    for (_, end), (start, _) in zip(blocks, [*blocks[1:], (len(text), 0)], strict=True):
        if text[end:start].strip():
            cuts.add(end)
    # A heading inside code is none.
    cuts = {cut for cut in cuts if not any(start < cut < end for start, end in blocks)}
    places = [0, *sorted(cuts), len(text)]
    for start, stop in pairwise(places):
        if text[start:stop].strip():
            yield text[start:stop].strip("\n")
