"""The figures of the lessons: current, described, and drawn by the code on the page."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from regard.lessons.lesson_pages import Lesson, all_lessons, figure_of, find_lesson

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "lessons" / "figures"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lesson_figures", ROOT / "docs/lesson_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def labels(svg: str) -> list[str]:
    """The words and numbers of a figure."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def agree(shown: list[str], drawn: list[str]) -> bool:
    """Return True if two lists of labels are equal up to 1 percent of a weight."""
    return len(shown) == len(drawn) and all(map(is_close, shown, drawn))


def is_close(shown: str, drawn: str) -> bool:
    numbers = shown.isdigit() and drawn.isdigit()
    return abs(int(shown) - int(drawn)) <= 1 if numbers else shown == drawn


def figures(lesson: Lesson) -> list[str]:
    return [figure_of(piece)[0] for piece in lesson.pieces if piece.kind == "figure"]


# tests/project/test_docs.py executes the code of every lesson, so make test draws one lesson alone.
@pytest.mark.full
@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(lesson, marks=() if lesson.number == 1 else pytest.mark.full)
        for lesson in all_lessons()
    ],
    ids=lambda lesson: lesson.name,
)
def test_the_figures_of_a_lesson_are_what_its_code_draws(
    lesson: Lesson, script: ModuleType, tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        drawn = script.draw(lesson, tmp_path)
    assert [path.name for path in drawn] == figures(lesson)
    for path in drawn:
        kept, new = labels((FIGURES / path.name).read_text()), labels(path.read_text())
        assert len(kept) > 3
        assert agree(kept, new), f"{path.name} is out of date: python docs/lesson_figures.py"


def test_a_lesson_has_two_figures_of_its_own() -> None:
    assert [len(figures(lesson)) for lesson in all_lessons()] == [2] * 9


def test_every_figure_belongs_to_a_lesson() -> None:
    used = [name for lesson in all_lessons() for name in figures(lesson)]
    assert sorted(path.name for path in FIGURES.iterdir()) == sorted(used)


@pytest.mark.parametrize("lesson", all_lessons(), ids=lambda lesson: lesson.name)
def test_a_figure_follows_code_and_is_described(lesson: Lesson) -> None:
    for before, piece in zip(lesson.pieces, lesson.pieces[1:], strict=False):
        if piece.kind == "figure":
            assert before.kind in ("code", "output")
            assert len(figure_of(piece)[1]) > 30


def test_a_figure_that_is_out_of_date_is_seen() -> None:
    kept = labels((FIGURES / figures(find_lesson("1"))[-1]).read_text())
    assert "33" in kept
    assert agree(kept, ["34" if label == "33" else label for label in kept])
    assert not agree(kept, ["40" if label == "33" else label for label in kept])
    assert not agree(kept, ["Live" if label == "Life" else label for label in kept])
    assert not agree(kept, kept[1:])
