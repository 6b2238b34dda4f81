"""The pictures of README and docs are those of this commit, and each is shown somewhere."""

import importlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
LINK = re.compile(r"\]\(([^()\s]+\.(?:webp|svg|html))\)")
pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="ast.unparse writes other code in other Pythons"
)
DRAWN_ELSEWHERE = ("benchmarks/results", "docs/lessons")  # each with a check of its own


def shown_in(folder: Path) -> ModuleType:
    """Load ``shown.py`` of a folder like docs/images."""
    spec = importlib.util.spec_from_file_location("shown", folder / "shown.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shown: Any = shown_in(IMAGES)


@pytest.fixture
def copy(tmp_path: Path) -> Any:
    """Copy the pictures and all that they show, to change it."""
    for name in ("docs/images", "src/regard/view"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (ROOT / "docs").glob("*.*"):
        shutil.copy(path, tmp_path / "docs")
    return shown_in(tmp_path / "docs" / "images")


def outdated(module: Any) -> list[str]:
    recorded = module.recorded()
    return [name for name in module.PICTURES if recorded.get(name) != module.fingerprint(name)]


def test_every_picture_is_of_this_commit() -> None:
    old_pictures = outdated(shown)
    assert not old_pictures, (
        f"draw them again, and look at them: docs/images/render.py {' '.join(old_pictures)}"
    )


def test_every_picture_is_shown_and_every_shown_picture_has_its_script() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    linked = {
        (path.parent / link).resolve().relative_to(ROOT).as_posix()
        for path in documents
        for link in LINK.findall(path.read_text())
        if "://" not in link
    }
    listed = {(IMAGES / name).resolve().relative_to(ROOT).as_posix() for name in shown.PICTURES}
    assert {name for name in linked if not name.startswith(DRAWN_ELSEWHERE)} == listed
    files = {path.name for path in IMAGES.iterdir() if path.suffix in (".webp", ".svg", ".png")}
    assert files == {name for name in shown.PICTURES if "/" not in name}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "before", "after", "changed"),
    [
        pytest.param("src/regard/view/web/bundle/pictured.css", "{", "{ ", {"page"}, id="page"),
        pytest.param("src/regard/view/figures/plot.py", "512", "513", {"figures"}, id="figure"),
        pytest.param("docs/training.md", "0.003", "0.004", {"figures"}, id="document"),
        pytest.param(
            "docs/images/render.py", "[:1400]", "[:1401]", {"page", "figures"}, id="recording"
        ),
        pytest.param(
            "docs/images/render.py",
            "seen[2][0, 3]",
            "seen[2][0, 4]",
            {"figures"},
            id="what is drawn",
        ),
        pytest.param("docs/images/terminal.svg", "MiniLM", "miniLM", {"terminal"}, id="by hand"),
        pytest.param(
            "src/regard/view/figures/plot.py", "\nimport", "\n# x\nimport", set(), id="comment"
        ),
    ],
)
def test_a_change_of_what_is_shown_is_seen(
    path: str, before: str, after: str, changed: set[str], copy: Any
) -> None:
    file = copy.ROOT / path
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    assert {copy.PICTURES[name].drawn_by for name in outdated(copy)} == changed


# Last digits of a page's numbers differ between machines, and with the number of threads.
DATA = re.compile(
    r'<script type="text/plain".*?</script>|"levels":"[^"]*"|\d+\.\d+(e-\d+)?', re.DOTALL
)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in shown.PICTURES if name.endswith(".html")])
def test_a_sample_page_is_what_its_script_writes_today(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(IMAGES)
    render: Any = importlib.import_module("render")
    written = render.write_page(name, tmp_path / "page.html").read_text()
    sample = IMAGES / name
    assert sample.stat().st_size < 600_000
    assert DATA.sub("", written) == DATA.sub("", sample.read_text())
