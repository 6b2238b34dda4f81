"""The documents are executed: their Python blocks run, and so do their regard commands.

The blocks of one document run in order, in one namespace and one temporary folder, so that a later
block can use what an earlier one made. A ``text`` block that follows a Python block holds what that
one prints, word for word. A block that cannot run says why in the line before it:

    <!-- not executed: the model in it is 16 GB -->
"""

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
LESSONS = sorted((ROOT / "docs" / "lessons").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[^\s`]*)")
MARK = re.compile(r"<!-- *not executed(?P<rest>.*?)-->")
# Other names of the two languages would escape execution unseen.
ALIASES = {"py": "python", "python3": "python", "pycon": "python", "shell-session": "console"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Attributes:
        language: as its fence names it.
        code: its lines.
        line: the document's line on which they begin.
        follows: whether only empty lines lie between it and the block before it.
        executed: whether no mark keeps it from running.
    """

    language: str
    code: str
    line: int
    follows: bool = False
    executed: bool = True


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text, in order; a wrong mark or language is a ValueError."""
    lines = text.splitlines()
    number = 0
    before: str | None = ""  # the last line of text; None after a block
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if opening is None:
            before = lines[number - 1].strip() or before
            continue
        start = number
        closing = re.compile(rf"^ *{opening['fence'][0]}{{{len(opening['fence'])},}} *$")
        while number < len(lines) and not closing.match(lines[number]):
            number += 1
        if number == len(lines):
            raise ValueError(f"line {start}: the block never ends")
        indent = len(opening["indent"])
        code = "".join(line[min(indent, leading(line)) :] + "\n" for line in lines[start:number])
        executed = is_executed(before or "", start)
        yield Block(language(opening, start), code, start + 1, before is None, executed)
        number += 1
        before = None


def leading(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def language(opening: re.Match[str], line: int) -> str:
    name = opening["language"].lower()
    if name in ALIASES:
        raise ValueError(f"line {line}: write {ALIASES[name]}, not {name}, so that the block runs")
    return name


def is_executed(before: str, line: int) -> bool:
    """Whether the line above a block lets it run; a mark without a reason is no mark."""
    mark = MARK.search(before)
    if mark is None:
        return True
    reason = mark["rest"].removeprefix(":").strip()
    if not mark["rest"].startswith(":") or len(reason.split()) < 2:
        raise ValueError(
            f"line {line}: 'not executed' needs a reason: <!-- not executed: reason -->"
        )
    return False


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


def run_document(text: str, name: str, folder: Path) -> None:
    """Run every block of a document that is to run; the first failure is raised."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks(text):
        is_output = block.language == "text" and block.follows and printed is not None
        if is_output and block.code != printed:
            raise AssertionError(f"{name}:{block.line}: what is printed is\n{printed}")
        printed = None
        if not block.executed:
            continue
        if block.language == "python":
            printed = run_python(block, name, namespace)
        elif block.language == "console":
            for line, command in commands(block):
                run_command(command, f"{name}:{line}", folder)


def run_python(block: Block, name: str, namespace: dict[str, object]) -> str:
    """Run a Python block; what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        # Empty lines in front: a traceback shows the document's own line numbers.
        exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    return printed.getvalue()


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


@pytest.mark.full
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_of_the_documents_runs(path: Path, folder: Path) -> None:
    if path in LESSONS:
        # Lines inside the package are its own; a lesson's are the learner's, and check names them.
        path = Path(shutil.copy(path, folder))
    run_document(path.read_text(), str(path), folder)


def missing_paths(text: str) -> list[str]:
    """The files and folders that a text names in backticks and that are not there."""
    named = re.findall(r"`([\w./-]+(?:\.(?:py|md|txt|toml)|/))`", text)
    places = (ROOT, ROOT / "src" / "regard")
    return [name for name in named if not any((place / name).exists() for place in places)]


def test_every_file_that_contributing_names_is_there() -> None:
    assert missing_paths(CONTRIBUTING.read_text()) == []


def unmapped(text: str, package: Path) -> list[str]:
    """The modules and folders of a package that no backticks of a text name."""
    modules = [path.name for path in package.glob("[!_]*.py")]
    folders = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    return sorted(name for name in modules + folders if f"`{name}`" not in text)


def test_every_module_is_on_the_map_of_contributing() -> None:
    assert unmapped(CONTRIBUTING.read_text(), ROOT / "src" / "regard") == []


def test_a_module_that_is_not_on_the_map_is_seen(tmp_path: Path) -> None:
    (tmp_path / "kinds").mkdir()
    for name in ("here.py", "gone.py", "__init__.py", "kinds/__init__.py"):
        (tmp_path / name).touch()
    assert unmapped("`here.py`", tmp_path) == ["gone.py", "kinds/"]


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
        "See `Makefile`, `tests/test_docs.py`, `scores.py`, `gone.py`, `tests/gone/`, `A[..., 3]`."
    )
    assert missing_paths(text) == ["gone.py", "tests/gone/"]


# The runner itself


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```\n"


def test_blocks_run_in_order_in_one_namespace(folder: Path) -> None:
    run_document(fenced("a = 2") + "Then:\n" + fenced("assert a == 2"), "doc.md", folder)


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
