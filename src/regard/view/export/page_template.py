"""The page's own code in one HTML text, with the data of a recording and a policy that allows both.

The page is pure ASCII and asks for nothing from anywhere. esbuild joins its modules into one
script.
"""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from importlib.resources import files

from regard.errors import RegardError

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_BUNDLE = files("regard.view").joinpath("web", "bundle")


def json_block(name: str, value: object) -> str:
    """JSON that cannot end its script element, whatever the tokens say.

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
    """Numbers in base64, as they are: the page reads them without a copy of them all."""
    return f'<script type="text/plain" id="{name}">{text}</script>\n'


def filled_template(
    first: Mapping[str, object],
    blocks: Iterable[str] = (),
    *,
    connects: str = "'none'",
) -> list[str]:
    """Return the parts of the page, to be written one after the other.

    Args:
        first: the page's JSON. Without pictures in it, the page has no code for them.
        blocks: blocks of numbers.
        connects: the policy's connect-src: where the page may ask for numbers.
    """
    name = "pictured" if "pictures" in first else "page"
    style, code = bundled(f"{name}.css"), bundled(f"{name}.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{digest(code)}'",
            f"style-src 'sha256-{digest(style)}'",
            "worker-src blob:",
            f"connect-src {connects}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "policy": [policy],
        "style": [style],
        "code": [code],
        "data": [json_block("recording", first), *blocks],
    }
    page: list[str] = []
    # split() alternates text and names, so nothing inside data or code is taken for a place.
    for i, piece in enumerate(_PLACE.split(_ascii(bundled(f"{name}.html")))):
        page += [piece] if i % 2 == 0 else parts[piece]
    return page


def bundled(name: str) -> str:
    """Return a file that esbuild made of the page's sources."""
    try:
        return _BUNDLE.joinpath(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RegardError("the page is not built; run `make page` in the clone.") from None


def _ascii(page: str) -> str:
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def digest(text: str) -> str:
    """Return the SHA-256 of a script or a style, as a Content-Security-Policy names it."""
    return b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
