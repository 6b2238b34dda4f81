"""The documentation as a site: complete, with links that hold, and without the network."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import regard
import regard.testing
import regard.transformers
import regard.vllm
from regard.lessons.lesson_pages import Lesson, all_lessons

ROOT = Path(__file__).parents[2]
# What a browser fetches without being asked; links that a reader follows are none of it.
FETCHED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*(?:src|href)=[\"']?(https?:)?//")
IN_STYLES = re.compile(r"(?:url\(|@import )[\"']?(?:https?:)?//")


REFERENCE = ROOT / "docs" / "api"


def public_names(module: ModuleType) -> Iterator[str]:
    """The names that people write, ``regard.plot.map``; those of a module instead of the module."""
    for name in module.__all__:
        item = getattr(module, name)
        if inspect.ismodule(item):
            yield from (f"regard.{name}.{inner}" for inner in item.__all__)
        else:
            yield f"{module.__name__}.{name}"


KATEX = ROOT / "node_modules" / "katex"
FORMULA = re.compile(r"\$\$.*?\$\$|(?<![\w$])\$[^$\n]+\$", re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not KATEX.exists():
        pytest.skip("KaTeX comes with `make lint`")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")  # strict: a broken link is an error
    return folder


@pytest.mark.full
@pytest.mark.parametrize("lesson", all_lessons(), ids=lambda lesson: lesson.name)
def test_a_lesson_is_a_page_with_its_outputs_and_answers(lesson: Lesson, site: Path) -> None:
    page = (site / "lessons" / f"{lesson.number}_{lesson.name}.html").read_text()
    fences = lesson.page.count("\n```") // 2
    assert page.count('<div class="highlight"><pre>') == fences
    assert page.count("<summary>") == lesson.page.count("<summary>") > 0
    assert page.count('class="arithmatex"') == FORMULA.sub("$", lesson.page).count("$")
    assert "```" not in page


def described() -> list[str]:
    """The names in the reference, ``docs/api``."""
    pages = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    return re.findall(r"^::: (\S+)$", pages, re.MULTILINE)


def test_every_public_name_is_in_the_reference_once() -> None:
    again = {
        f"regard.masks.{name}" for name in regard.__all__
    }  # regard.masks.Causal is regard.Causal
    modules = (regard, regard.testing, regard.transformers, regard.vllm)
    names = {name for module in modules for name in public_names(module)} - again
    assert sorted(described()) == sorted(names)


@pytest.mark.full
def test_the_search_of_the_site_finds_every_public_name(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    anchors = {entry["location"].partition("#")[2] for entry in entries}
    assert [name for name in described() if name not in anchors] == []


@pytest.mark.full
def test_the_site_asks_nothing_of_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    fetching = {page.name: FETCHED.findall(page.read_text()) for page in pages}
    assert {name: found for name, found in fetching.items() if found} == {}
    styles = {sheet.name: IN_STYLES.findall(sheet.read_text()) for sheet in site.rglob("*.css")}
    assert {name: found for name, found in styles.items() if found} == {}


def test_what_would_be_fetched_is_seen() -> None:
    assert FETCHED.search('<script src="https://example.com/shim"></script>')
    assert FETCHED.search("<link rel=stylesheet href=//example.com/font.css>")
    assert IN_STYLES.search("@font-face{src:url(https://example.com/font)}")
    assert not FETCHED.search('<a href="https://example.com">')


@pytest.mark.full
def test_links_between_documents_hold_on_the_site(site: Path) -> None:
    home, lessons = (site / "index.html").read_text(), (site / "lessons.html").read_text()
    assert 'href="masks.html"' in home
    assert 'src="images/agreement.webp"' in home
    assert 'href="lessons/1_averages.html"' in lessons
