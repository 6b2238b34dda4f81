"""The documents are executed: their Python blocks run, and so do their regard commands.

The blocks of one document run in order, in one namespace and one temporary folder, so that a later
block can use what an earlier one made; those of the README run alone. A ``text`` block that follows
a Python block holds what that one prints, word for word. A block that cannot run says why in the
line before it:

    <!-- not executed: the model in it is 16 GB -->
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from documents import ALIASES, Block, agree, blocks, run_python, sentences

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
LESSONS = sorted((ROOT / "docs" / "lessons").glob("*.md"))
DOCUMENTS = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = ("beyond-one-process", "training")  # eight processes with PyTorch; four training runs
# Without the two that are generated.
PROSE = [path for path in DOCUMENTS if path.name not in ("command.md", "model_types.md")]


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """The lines of a console block that begin with ``$ regard``, continued lines joined."""
    lines = iter(enumerate(block.code.splitlines(), block.line))
    for number, line in lines:
        if not re.match(r"\$ regard( |$)", line):
            continue
        command = line.removeprefix("$ ")
        while command.endswith("\\"):
            command = command[:-1] + next(lines, (0, ""))[1].removeprefix("> ").strip()
        yield number, command


def run_document(
    text: str, name: str, folder: Path, *, commands_too: bool = True, alone: bool = False
) -> None:
    """Run every block of a document that is to run; the first failure is raised.

    Args:
        text: the document.
        name: of the document.
        folder: where its commands run.
        commands_too: run its regard commands, not its Python blocks alone.
        alone: give each block an empty namespace, so that it runs when it is pasted alone.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks(text):
        if alone:
            namespace = {"__name__": "__main__"}
        is_output = block.language == "text" and block.follows and printed is not None
        if is_output and not agree(block.code, printed or ""):
            raise AssertionError(f"{name}:{block.line}: what is printed is\n{printed}")
        printed = None
        if not block.executed:
            continue
        if block.language == "python":
            printed = run_python(block, name, namespace)
        elif block.language == "console" and commands_too:
            for line, command in commands(block):
                run_command(command, f"{name}:{line}", folder)


def run_command(command: str, where: str, folder: Path) -> None:
    """Run a command line in a shell that finds this environment's ``regard`` first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", command],
        check=False,
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        raise AssertionError(f"{where}: `{command}` ended with {done.returncode}\n{done.stderr}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder; a document's seed does not reach the next test."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield tmp_path


def has_command(path: Path) -> bool:
    """Return True if a document has a command to run."""
    consoles = (block for block in blocks(path.read_text()) if block.language == "console")
    return any(list(commands(block)) for block in consoles if block.executed)


# PyTorch's compiler imports its own deprecated functions.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.full if path.stem in SLOW else ()) for path in DOCUMENTS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_python_block_of_the_documents_runs(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path in LESSONS:
        # Lines inside the package are its own; a lesson's are the learner's, and check names them.
        path = Path(shutil.copy(path, folder))
    if path.name == "vision.md":
        shutil.copytree(path.with_name("digit-finder"), "digit-finder")
        monkeypatch.syspath_prepend(path.parent)
    run_document(path.read_text(), str(path), folder, commands_too=False, alone=path == README)


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if has_command(path)],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_block_of_the_documents_runs(path: Path, folder: Path) -> None:
    run_document(path.read_text(), str(path), folder)


def test_the_readme_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 1100


def test_the_changelog_of_the_first_release_is_short() -> None:
    release, _, _ = (ROOT / "CHANGELOG.md").read_text().partition("### Gone before the release")
    assert len(release.split()) <= 150


@pytest.mark.full
@pytest.mark.parametrize("name", ["README.md", "docs/memory.md"])
def test_the_error_of_eager_attention_is_the_one_that_the_script_prints(name: str) -> None:
    script = ROOT / "docs" / "out_of_memory.py"
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    error = next(block for block in blocks((ROOT / name).read_text()) if block.language == "text")
    assert done.stdout == error.code


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_has_more_than_40_words(path: Path) -> None:
    assert [each for each in sentences(path.read_text()) if len(each.split()) > 40] == []


def test_no_sentence_stands_in_two_places() -> None:
    said = Counter(each for path in PROSE for each in sentences(path.read_text()))
    assert [each for each, times in said.items() if times > 1 and len(each.split()) > 5] == []


def test_a_sentence_ends_at_its_point_and_at_the_end_of_an_item() -> None:
    text = "# Head\n\nOne [two](a.md). Three\nfour:\n- Five `a.b` six.\n- Seven.\n\n" + fenced(
        "a = 2"
    )
    assert list(sentences(text)) == ["One two.", "Three four:", "Five `a.b` six.", "Seven."]


def missing_paths(text: str) -> list[str]:
    """The files and folders that a text names in backticks and that are not there."""
    named = re.findall(r"`([\w./-]+(?:\.(?:py|md|txt|toml)|/))`", text)
    places = (ROOT, ROOT / "src" / "regard")
    return [name for name in named if not any((place / name).exists() for place in places)]


def test_every_file_that_contributing_names_is_there() -> None:
    assert missing_paths(CONTRIBUTING.read_text()) == []


def unmapped(text: str, package: Path) -> list[str]:
    """The folders of a package that no backticks of a text name."""
    inits = package.glob("*/**/__init__.py")
    folders = [f"{path.parent.relative_to(package).as_posix()}/" for path in inits]
    return sorted(name for name in folders if f"`{name}`" not in text)


def test_every_folder_is_on_the_map_of_contributing() -> None:
    assert unmapped(CONTRIBUTING.read_text(), ROOT / "src" / "regard") == []


def test_a_folder_that_is_not_on_the_map_is_seen(tmp_path: Path) -> None:
    for name in ("here", "here/gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    assert unmapped("`here/`, `gone/`", tmp_path) == ["here/gone/"]


def test_ci_runs_the_full_tests_of_every_folder() -> None:
    areas = re.findall(r"tests/\w+", (ROOT / ".ci" / "run").read_text())
    folders = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")}
    assert sorted(areas) == sorted(path.relative_to(ROOT).as_posix() for path in folders)


def anchors(text: str) -> set[str]:
    """What the headings of a document are called in its address, as GitHub makes it of them."""
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """The local links of a document in this folder that lead nowhere."""

    def is_broken(link: str) -> bool:
        path, _, anchor = link.partition("#")
        if path and not (folder / path).exists():
            return True
        return bool(anchor) and anchor not in anchors((folder / path).read_text() if path else text)

    links = re.findall(r"\]\(([^()\s]+)\)", text)
    return [link for link in links if "://" not in link and is_broken(link)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_local_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path.read_text(), path.parent) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Over `there`\n")
    links = ("other.md", "other.md#over-there", "#here", "https://pytorch.org", "gone.md")
    text = "# Here\n" + " ".join(f"[text]({link})" for link in (*links, "other.md#gone", "#gone"))
    assert broken_links(text, tmp_path) == ["gone.md", "other.md#gone", "#gone"]


def test_a_file_that_is_not_there_is_seen() -> None:
    text = (
        "See `Makefile`, `tests/cases.py`, `masks/mask.py`, `gone.py`, `tests/gone/`, `A[..., 3]`."
    )
    assert missing_paths(text) == ["gone.py", "tests/gone/"]


def unknown_messages(text: str) -> list[str]:
    """The messages in first columns of tables of which the package lacks a piece."""
    sources = [path.read_text() for path in (ROOT / "src" / "regard").rglob("*.py")]
    words = "".join(sources) + "CUDA out of memory"  # which is PyTorch's
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]*)`", cell)]
    pieces = {message: message.split("…") for message in messages if not re.search("[=.]", message)}
    return [m for m, parts in pieces.items() if not all(part.strip() in words for part in parts)]


def test_troubleshooting_quotes_messages_of_the_package() -> None:
    assert unknown_messages((ROOT / "docs" / "troubleshooting.md").read_text()) == []


def test_a_message_that_nothing_prints_is_seen() -> None:
    text = "| message |\n| --- |\n| `… is damaged` | x |\n| `the … is kaputt` | `y` |\n"
    assert unknown_messages(text) == ["the … is kaputt"]


def test_the_seconds_and_mebibytes_of_the_readme_are_those_of_the_results() -> None:
    def cells(line: str) -> list[str]:
        return [cell.strip() for cell in line.strip("|").split("|")]

    # The tables of benchmarks/README.md are made of the results.
    tables = (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    _, found = README.read_text().split("| answer | seconds | MiB |\n| --- | --- | --- |\n")
    rows = [cells(line) for line in found.split("\n\n")[0].splitlines()]
    assert len(rows) >= 6
    for name, seconds, mebibytes in rows:
        measured = [cells(line) for line in tables if line.startswith(f"| {name} |")]
        assert {seconds, mebibytes} <= {cell for row in measured for cell in row}, name


# The runner itself


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```\n"


def test_blocks_run_in_order_in_one_namespace(folder: Path) -> None:
    run_document(fenced("a = 2") + "Then:\n" + fenced("assert a == 2"), "doc.md", folder)


def test_a_block_that_needs_another_does_not_run_alone(folder: Path) -> None:
    with pytest.raises(NameError):
        run_document(fenced("a = 2") + "Then:\n" + fenced("assert a"), "doc.md", folder, alone=True)


def test_a_failing_python_block_fails_at_its_own_line(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError) as failure:
        run_document("# Title\n\n" + fenced("a = 0\n1 / a"), "doc.md", folder)
    assert failure.traceback[-1].lineno + 1 == 5


def test_what_a_block_prints_is_what_the_document_says(folder: Path) -> None:
    run_document(fenced("print(1 + 1)") + "\n" + fenced("2", "text"), "doc.md", folder)


def test_other_words_than_those_that_are_printed_fail_at_their_line(folder: Path) -> None:
    text = fenced("print(1 + 1)") + "\n" + fenced("3", "text")
    with pytest.raises(AssertionError, match=r"doc\.md:6: what is printed is\n2"):
        run_document(text, "doc.md", folder)


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        pytest.param("a -1.2346 2\n", True, id="a last digit that differs by 1"),
        pytest.param("a -1.2347 2\n", False, id="a last digit that differs by 2"),
        pytest.param("a -1.2345 3\n", False, id="another whole number"),
        pytest.param("b -1.2345 2\n", False, id="another word"),
        pytest.param("a -1.23450 2\n", False, id="another count of digits"),
        pytest.param("a -1.2345 2 0.5\n", False, id="one number more"),
    ],
)
def test_machines_may_differ_in_the_last_digit_of_a_fraction(printed: str, same: bool) -> None:
    assert agree("a -1.2345 2\n", printed) is same


def test_a_text_after_other_text_is_no_output(folder: Path) -> None:
    run_document(fenced("print(1)") + "Beside:\n" + fenced("2", "text"), "doc.md", folder)


def test_a_block_indented_in_a_list_runs(folder: Path) -> None:
    text = "1. First\n   ```python\n   if True:\n       raise KeyError\n   ```\n"
    with pytest.raises(KeyError):
        run_document(text, "doc.md", folder)


def test_a_failing_command_fails(folder: Path) -> None:
    text = fenced("$ regard no-such-command", "console")
    with pytest.raises(AssertionError, match=r"doc\.md:2: `regard no-such-command` ended with"):
        run_document(text, "doc.md", folder)


@pytest.mark.parametrize("language", ["text", "bash", ""])
def test_other_languages_are_not_run(folder: Path, language: str) -> None:
    run_document(fenced("raise KeyError", language), "doc.md", folder)


def test_the_commands_of_a_console_block_are_its_regard_lines() -> None:
    code = "$ regard see 'a b' \\\n>   --top 3\noutput\nregard output\n$ regarding\n$ regard"
    [block] = blocks("\n" + fenced(code, "console"))
    assert list(commands(block)) == [(3, "regard see 'a b' --top 3"), (8, "regard")]


def test_a_mark_with_a_reason_keeps_the_next_block_from_running() -> None:
    text = "<!-- not executed: needs a GPU -->\n\n" + fenced("raise KeyError") + fenced("a = 1")
    assert [block.executed for block in blocks(text)] == [False, True]


@pytest.mark.parametrize(
    "mark", ["<!-- not executed -->", "<!-- not executed: -->", "<!-- not executed: slow -->"]
)
def test_a_mark_without_a_reason_is_an_error(mark: str) -> None:
    with pytest.raises(ValueError, match="'not executed' needs a reason"):
        list(blocks(mark + "\n" + fenced("a = 1")))


@pytest.mark.parametrize("language", sorted(ALIASES))
def test_a_language_under_another_name_is_an_error(language: str) -> None:
    with pytest.raises(ValueError, match="so that the block runs"):
        list(blocks(fenced("a = 1", language)))


def test_a_block_that_never_ends_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1: the block never ends"):
        list(blocks("```python\na = 1\n"))


def test_a_longer_fence_holds_a_shorter_one() -> None:
    [block] = blocks("````markdown\n" + fenced("a = 1") + "````\n")
    assert block.language == "markdown"
