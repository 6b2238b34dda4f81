"""``regard learn``: the lessons, in the terminal or as notebooks."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from regard.lessons.lesson_notebooks import write_notebooks
from regard.lessons.lesson_pages import Lesson, all_lessons, find_lesson
from regard.text.escaping import visible

__all__ = ["learn", "parts"]

# As wide as the lines of the lessons; longer ones are tiring to read.
_WIDEST = 110

_OUTPUT = re.compile(r"^```text\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
# Weights, as they are printed: from 0 to 1.
_WEIGHT = re.compile(r"(?<![\w.-])(?:0\.\d{2,}|1\.0{2,})(?![\w.])")
# By how much of a row's attention a weight is; of the terminal's own colours, light or dark.
_STYLES = ((0.0, "dim"), (0.25, "cyan"), (0.5, "bold cyan"), (1.0, "bold reverse cyan"))

Asked = Annotated[
    str | None,
    typer.Argument(
        metavar="LESSON", help="Number or name of a lesson. Without it, list all lessons."
    ),
]
Notebooks = Annotated[
    Path | None,
    typer.Option(
        "--notebook",
        metavar="DIR",
        help="Write the lesson, or all of them, as notebooks into this folder.",
    ),
]


def learn(lesson: Asked = None, notebook: Notebooks = None) -> None:
    """Learn attention, from averages to a transformer that learns."""
    lessons = all_lessons() if lesson is None else (find_lesson(lesson),)
    if notebook is not None:
        for path in write_notebooks(notebook, lessons):
            sys.stdout.write(f"{visible(str(path))}\n")
    elif lesson is None:
        sys.stdout.write(_listed(lessons))
    elif sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        _read(lessons[0], Console(emoji=False))
    else:
        sys.stdout.write(lessons[0].text)


def _listed(lessons: tuple[Lesson, ...]) -> str:
    width = max(len(lesson.name) for lesson in lessons)
    lines = [f"  {each.number}  {each.name.ljust(width)}  {each.title}" for each in lessons]
    return (
        "Lessons on attention, from averages to a transformer that learns:\n\n"
        + "\n".join(lines)
        + "\n\nregard learn 1                    read one, step by step\n"
        "regard learn --notebook lessons   write them as notebooks, to run and change\n"
    )


def _read(lesson: Lesson, console: Console) -> None:
    """Show a lesson step by step; Enter goes on."""
    steps = lesson.steps
    for place, step in enumerate(steps, start=1):
        for part in parts(step):
            console.print(part, width=min(console.width, _WIDEST))
        if place < len(steps) and not _goes_on(console, place, len(steps)):
            return
    write = f"regard learn {lesson.number} --notebook lessons"
    console.print(f"[dim]To do the exercises yourself: {write} makes a notebook of it.[/dim]")


def parts(step: str) -> Iterator[Markdown | Padding]:
    """Yield a step for the terminal: its text, its code, and its outputs with coloured weights."""
    done = 0
    for block in _OUTPUT.finditer(step):
        if step[done : block.start()].strip():
            yield Markdown(step[done : block.start()], code_theme="ansi_dark")
        yield Padding(_coloured(block[1].rstrip("\n")), (1, 1))
        done = block.end()
    if step[done:].strip():
        yield Markdown(step[done:], code_theme="ansi_dark")


def _coloured(output: str) -> Text:
    text = Text(output, no_wrap=True)
    for weight in _WEIGHT.finditer(output):
        style = next(style for most, style in _STYLES if float(weight[0]) <= most)
        text.stylize(style, *weight.span())
    return text


def _goes_on(console: Console, place: int, count: int) -> bool:
    try:
        answer = console.input(f"[dim]{place} of {count} · Enter goes on, q ends[/dim] ")
    except EOFError:
        return False
    console.print()
    return answer.strip().lower() not in ("q", "quit")
