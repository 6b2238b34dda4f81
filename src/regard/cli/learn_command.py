"""``regard learn``: the lessons, as text or as notebooks."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import option
from regard.text.escaping import visible

Asked = Annotated[
    str | None,
    typer.Argument(
        metavar="LESSON", help="Number or name of a lesson. Without it, list all lessons."
    ),
]
Notebooks = Annotated[
    Path | None,
    option("--notebook DIR", "Write the lesson, or all of them, as notebooks into this folder."),
]


def learn(lesson: Asked = None, notebook: Notebooks = None) -> None:
    """Learn attention, from averages to a transformer that learns."""
    from regard.lessons.lesson_notebooks import write_notebooks
    from regard.lessons.lesson_pages import all_lessons, find_lesson

    lessons = all_lessons() if lesson is None else (find_lesson(lesson),)
    if notebook is not None:
        for path in write_notebooks(notebook, lessons):
            sys.stdout.write(f"{visible(str(path))}\n")
    elif lesson is not None:
        sys.stdout.write(lessons[0].text)
    else:
        width = max(len(each.name) for each in lessons)
        lines = [f"  {each.number}  {each.name.ljust(width)}  {each.title}" for each in lessons]
        sys.stdout.write(
            "Lessons on attention, from averages to a transformer that learns:\n\n"
            + "\n".join(lines)
            + "\n\nregard learn 1                    read one\n"
            "regard learn --notebook lessons   write them as notebooks, to run and change\n"
        )
