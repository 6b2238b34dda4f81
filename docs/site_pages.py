"""The site's pages that stand elsewhere in the repository, and links that hold in both places.

mkdocs calls ``on_files`` and ``on_page_markdown``. The README is the first page.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
KATEX = ROOT / "node_modules" / "katex"
_ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_LINK_WITH_TEXT = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(?:#[^)\s]*)?\)")


def _place(path: str) -> str | None:
    """Return the place of a file of the repository on the site; None if it is not part of it."""
    if path in _ELSEWHERE:
        return _ELSEWHERE[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/results/") and path.endswith(".svg"):
        return f"images/{PurePosixPath(path).name}"
    return None


def _katex(config: Any) -> Iterator[File]:
    """Yield KaTeX, its fonts and its licence as files of the site."""
    if not KATEX.exists():
        raise PluginError("KaTeX, which draws the formulas, is not installed.\n    Run: make docs")
    dist = KATEX / "dist"
    scripts = [dist / "katex.min.js", dist / "katex.min.css"]
    for path in (*scripts, *sorted(dist.glob("fonts/*.woff2"))):
        place = f"katex/{path.relative_to(dist).as_posix()}"
        yield File.generated(config, place, abs_src_path=str(path))
    yield File.generated(config, "katex/LICENSE.txt", abs_src_path=str(KATEX / "LICENSE"))


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside of docs/, and the generated pages."""
    pictures = ROOT.glob("benchmarks/results/*.svg")
    for path in (*(ROOT / name for name in _ELSEWHERE), *pictures):
        place = _place(path.relative_to(ROOT).as_posix())
        assert place is not None
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for file in _katex(config):
        files.append(file)
    sys.path.append(str(Path(__file__).parent))
    import mistake_pages  # beside this file, which mkdocs loads by its path

    files.append(File.generated(config, "mistakes.md", content=mistake_pages.page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    if page.file.abs_src_path is None:  # generated: its links are the site's
        return markdown
    source = Path(page.file.abs_src_path).parent
    here = PurePosixPath(page.file.src_uri).parent

    def target(link: str) -> str | None:
        path = Path(os.path.normpath(source / link))
        return _place(path.relative_to(ROOT).as_posix()) if path.is_relative_to(ROOT) else None

    def relinked(match: re.Match[str]) -> str:
        place = target(match[1])
        if place is None:
            return match[0]
        return f"]({os.path.relpath(place, here)}{match[2] or ''})"

    def without(match: re.Match[str]) -> str:
        there = (source / match[2]).exists()
        return match[1] if there and target(match[2]) is None else match[0]

    markdown = _LINK.sub(relinked, _LINK_WITH_TEXT.sub(without, markdown))
    return markdown.replace("<details>", '<details markdown="1">')
