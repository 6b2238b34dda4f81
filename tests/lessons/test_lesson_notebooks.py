"""The notebooks that ``regard learn --notebook`` writes: they open, run, and show their tables."""

from pathlib import Path

import nbclient
import nbformat
import pytest
from nbformat import NotebookNode

from documents import agree
from regard.lessons.lesson_notebooks import write_notebooks
from regard.lessons.lesson_pages import Lesson, all_lessons

Outputs = dict[int, list[list[NotebookNode]]]


def written(folder: Path) -> list[NotebookNode]:
    """All lessons as Jupyter reads them."""
    paths = write_notebooks(folder, all_lessons())
    return [nbformat.read(path, as_version=4) for path in paths]


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """What each cell of code put out, by the number of the lesson.

    One kernel runs them all, emptied before each lesson: it is its start that takes long.
    """
    notebooks = written(tmp_path_factory.mktemp("notebooks"))
    cells: list[NotebookNode] = []
    for notebook in notebooks:
        cells += [nbformat.v4.new_code_cell("%reset -f"), *code_of(notebook)]
    together = nbformat.v4.new_notebook(cells=cells, metadata=notebooks[0].metadata)
    nbclient.NotebookClient(together, timeout=300).execute()  # an error in a cell is raised
    done = iter(together.cells)
    found: Outputs = {}
    for number, notebook in enumerate(notebooks, start=1):
        next(done)
        found[number] = [next(done).outputs for _ in code_of(notebook)]
    return found


def shown(outputs: list[NotebookNode]) -> str:
    """What a cell put out as text, but for the progress bar."""
    texts = [
        output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"
        for output in outputs
        if output.get("name") != "stderr" and "image/png" not in output.get("data", {})
    ]
    return "".join(texts)


def test_they_are_notebooks_for_jupyter(tmp_path: Path) -> None:
    notebooks = written(tmp_path)
    assert len(notebooks) == 9
    for notebook in notebooks:
        nbformat.validate(notebook)


@pytest.mark.full
@pytest.mark.parametrize("lesson", all_lessons(), ids=lambda lesson: lesson.name)
def test_running_a_notebook_shows_what_the_lesson_says(lesson: Lesson, run: Outputs) -> None:
    expected: list[str] = []
    for piece in lesson.pieces:
        if piece.kind == "code":
            expected.append("")
        elif piece.kind == "output":
            expected[-1] = piece.text
    said = "".join(expected)
    assert agree(
        said,
        "".join(shown(out) for out, text in zip(run[lesson.number], expected, strict=True) if text),
    )


@pytest.mark.full
def test_small_matrices_are_html_tables(run: Outputs) -> None:
    shown = [output.data for outputs in run[1] for output in outputs if "data" in output]
    tables = [data["text/html"] for data in shown if "<table" in data.get("text/html", "")]
    assert len(tables) == 2
    assert all(table.count("<tr") >= 4 for table in tables)
