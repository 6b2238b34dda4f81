"""The page's own code in one HTML text, with the data of a recording and a policy that allows both.

The page is pure ASCII and asks for nothing from anywhere: its modules are joined into one script.
"""

import hashlib
import json
import re
from base64 import b64encode
from importlib.resources import files

from regard.errors import RegardError

__all__ = ["filled_template", "json_block", "number_block"]

_MODULE_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";$', re.MULTILINE)
_MODULE_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)
# What nobody reads in the page: comments of whole lines, types in a line, indentation.
_COMMENT = re.compile(
    r"^[ \t]*(?:/\*(?:(?!\*/).)*\*/|//[^\n]*)\n|/\*\* @type (?:(?!\*/).)*\*/ ?|^[ \t]+",
    re.MULTILINE | re.DOTALL,
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def json_block(name: str, value: object) -> str:
    """JSON that cannot end its script element, whatever the tokens say.

    Args:
        name: the element's id.
        value: what JSON can hold.

    Example:
        >>> from regard.view.export.page_template import json_block
        >>> "</script>" in json_block("data", "</script><script>")[:-10]
        False
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def number_block(name: str, text: str) -> str:
    """Numbers in base64, as they are: the page reads them without a copy of them all.

    Args:
        name: the element's id.
        text: what ``packed`` gives.
    """
    return f'<script type="text/plain" id="{name}">{text}</script>\n'


def filled_template(data: list[str], *, connects: str = "'none'") -> list[str]:
    """Return the parts of the page, to be written one after the other.

    Args:
        data: blocks of JSON and of numbers.
        connects: the policy's connect-src: where the page may ask for numbers.

    Raises:
        RegardError: the page's code cannot stand in one script.
    """
    style, code = _COMMENT.sub("", _source("page.css")), _script()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_digest(code)}'",
            f"style-src 'sha256-{_digest(style)}'",
            "worker-src blob:",
            f"connect-src {connects}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {"policy": [policy], "style": [style], "code": [code], "data": data}
    page: list[str] = []
    # split() alternates text and names, so nothing inside data or code is taken for a place.
    for i, piece in enumerate(_PLACE.split(_source("index.html"))):
        page += [piece] if i % 2 == 0 else parts[piece]
    return page


def _source(name: str) -> str:
    text = files("regard.view").joinpath("web", name).read_text(encoding="utf-8")
    return "".join(c if c.isascii() else _escaped(c, name) for c in text)


def _escaped(character: str, name: str) -> str:
    """Escape a character, because the file is pure ASCII that no server can misread."""
    if name.endswith(".html"):
        return f"&#{ord(character)};"
    if name.endswith(".css"):
        return f"\\{ord(character):06x}"
    # Not \u{...}: in an expression without the u flag that means its letters.
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _digest(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _script() -> str:
    """All modules as one script: each a function of its own that returns its exports."""
    joined: dict[str, str] = {}
    _join("main", joined)
    script = "\n".join(joined.values())
    if "</script" in script.lower() or "<!--" in script:
        raise RegardError("the page's code contains '</script' or '<!--' and cannot be inlined.")
    return script


def _exports(source: str) -> set[str]:
    return {exported for _, exported in _MODULE_EXPORT.findall(source)}


def _join(name: str, joined: dict[str, str]) -> None:
    """Append a module after the modules it imports; main.js says why this is safe."""
    source = _COMMENT.sub("", _source(f"{name}.js"))
    for wanted, other in _MODULE_IMPORT.findall(source):
        if other not in joined:
            _join(other, joined)
        if missing := set(wanted.split(", ")) - _exports(_source(f"{other}.js")):
            raise RegardError(f"{name}.js imports {missing.pop()!r}, which {other}.js has not.")
    exports = ", ".join(sorted(_exports(source)))
    source = _MODULE_IMPORT.sub(r"const { \1 } = module_\2;", source)
    source = _MODULE_EXPORT.sub(r"\1", source)
    if re.search(r"^(import|export)\b", source, re.MULTILINE):
        raise RegardError(f"{name}.js has an import or export in another form than main.js asks.")
    joined[name] = f"const module_{name} = (() => {{\n{source}\nreturn {{ {exports} }};\n}})();"
