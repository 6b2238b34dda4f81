"""The pictures of README and docs, and a fingerprint of what each of them shows.

``render.py`` draws them, and writes the fingerprints into ``shown.json``. A test compares these with
today's code: if the page or a figure has changed, its pictures are drawn again.

A fingerprint covers the drawing code, the recipe below, the functions in ``render.py`` that make the
recording and draw the picture, and the picture itself. It does not cover comments and docstrings, nor the
models. A test writes the two sample pages again, and so sees a change of what a page holds.
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VIEW = ROOT / "src" / "regard" / "view"
RECORD = HERE / "shown.json"


@dataclass(frozen=True)
class Picture:
    """A picture and what it shows.

    Attributes:
        drawn_by: "page", "figures" or "terminal": the folder of the package that draws it.
        source: the function in ``render.py`` that makes the recording, or a document of ``docs/``
            whose code draws the picture.
        address: the view of the page; empty for others.
        size: the window in pixels.
    """

    drawn_by: str
    source: str
    address: str = ""
    size: tuple[int, int] = (1280, 800)


SUBJECT = "layer=3&head=1&query=6&key=2"
PICTURES = {
    "agreement.webp": Picture("page", "agreement", f"view=map&compare=beside&with=9.1&{SUBJECT}", (1280, 660)),
    "overview.webp": Picture("page", "keys", f"view=overview&{SUBJECT}"),
    "text.webp": Picture("page", "keys", f"view=text&{SUBJECT}"),
    "steps.webp": Picture("page", "keys", f"view=steps&{SUBJECT}"),
    "segments.webp": Picture("page", "keys", "view=segments&parts=words&heads=mean", (1560, 780)),
    "copied-name.webp": Picture("page", "copied_name", "view=map&layer=17&head=4", (1280, 860)),
    "vision.webp": Picture("page", "photograph", "view=image&layer=10&head=4&query=0"),
    "eyes.webp": Picture("page", "photograph", "view=image&layer=10&head=4&query=73"),
    "digit.webp": Picture("page", "finder", "view=image&layer=0&head=0&query=0"),
    "plot-map.svg": Picture("figures", "short"),
    "plot-heads.svg": Picture("figures", "short"),
    "plot-entropy.svg": Picture("figures", "short"),
    "plot-segments.svg": Picture("figures", "short"),
    "plot-sinks.svg": Picture("figures", "copied_name"),
    "plot-vision.svg": Picture("figures", "finder"),
    "terminal.svg": Picture("terminal", "short"),
    "training.svg": Picture("figures", "training.md"),
    "../sample.html": Picture("page", "keys"),
    "../sample-image.html": Picture("page", "finder"),
}
"""Every picture, and the two sample pages, by its path from this folder."""


def fingerprint(name: str) -> str:
    """Return the fingerprint of a picture and of what it shows."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (repr(PICTURES[name]), *_drawing_code(name), _recipe(name)):
        digest.update(part.encode())
    digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def _drawing_code(name: str) -> Iterator[str]:
    """Yield the code that draws a picture, without its comments."""
    yield (VIEW / "colours.json").read_text()
    drawn_by = PICTURES[name].drawn_by
    if drawn_by == "page":  # the bundle has neither comments nor line breaks
        for path in ("pictured.html", "pictured.css", "pictured.js"):
            yield (VIEW / "web" / "bundle" / path).read_text()
    else:
        for path in sorted((VIEW / drawn_by).glob("*.py")):
            yield _code(ast.parse(path.read_text()))


def _recipe(name: str) -> str:
    """Return the functions that make and draw a recording, or the code of a document above a picture."""
    source = PICTURES[name].source
    if source.endswith(".md"):
        above, _, _ = (HERE.parent / source).read_text().partition(f"](images/{name})")
        blocks = above.split("```python\n")[1:]
        return "".join(block.partition("```")[0] for block in blocks)
    statements = ast.parse((HERE / "render.py").read_text()).body
    texts = [each for each in statements if isinstance(each, ast.Assign) and _is_text(each.value)]
    functions = {each.name: each for each in statements if isinstance(each, ast.FunctionDef)}
    return "\n".join(map(_code, [*texts, functions[source], functions[_draws(name)]]))


def _draws(name: str) -> str:
    """Return the name of the function in ``render.py`` that draws a picture."""
    picture = PICTURES[name]
    if picture.drawn_by != "page":
        return {"figures": "figure", "terminal": "terminal"}[picture.drawn_by]
    if name.endswith(".html"):
        return "write_page"
    return "moving" if picture.source == "copied_name" else "screenshot"


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _code(tree: ast.AST) -> str:
    """Return Python code without comments and docstrings."""
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if is_documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def recorded() -> dict[str, str]:
    """Return the fingerprints of the pictures when they were drawn."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def record(name: str) -> None:
    """Write the fingerprint of a picture that was drawn just now."""
    written = recorded() | {name: fingerprint(name)}
    kept = {each: written[each] for each in PICTURES if each in written}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
