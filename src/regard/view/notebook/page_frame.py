"""The page inside another page: a frame that can run its script and reach nothing around it."""

import string
import zlib
from base64 import b85encode
from html import escape
from typing import NamedTuple

from regard.recording.recording import Recording
from regard.view.export.page_template import filled_template, json_block
from regard.view.tiles.manifest import first_sequence, live_layers, manifest, small_map

__all__ = ["HEIGHT", "SANDBOX", "Pages", "framed", "notebook_pages"]

HEIGHT = 680
"""Pixels."""
SANDBOX = "allow-scripts allow-downloads"
# A few seconds of work.
_MOST_WEIGHTS = 2**28


# Base 85, whose digits are those of base64.b85encode but for what HTML would escape.
_DIGITS = (
    string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%.()*+-;,=:?@^_`{|}~"
)
_SAFE = str.maketrans("&<>", ".,:")
# A notebook keeps every page that it shows: compressed, one takes under half of its size.
_UNPACKED = """<!doctype html>
<meta charset="utf-8">
<script type="text/plain" id="page">{packed}</script>
<script>
(async () => {{
  const text = document.getElementById("page").textContent;
  const digits = "{digits}";
  const value = (five) => [...five].reduce((sum, digit) => sum * 85 + digits.indexOf(digit), 0);
  const words = text.match(/.{{5}}/g).map(value);
  const bytes = new DataView(new ArrayBuffer(4 * words.length));
  words.forEach((word, at) => bytes.setUint32(4 * at, word));
  const blob = new Blob([bytes.buffer.slice(0, {length})]);
  const stream = blob.stream().pipeThrough(new DecompressionStream("deflate"));
  const page = await new Response(stream).text();
  document.open();
  document.write(page);
  document.close();
}})();
</script>
<noscript><p>This page draws with its own script, which does not run here.</p></noscript>
"""


def framed(page: str, title: str) -> str:
    """Return an iframe that holds a whole page, as HTML.

    The page is compressed; a script in the frame puts it in its own place.

    Args:
        page: HTML.
        title: for those who do not see it.
    """
    packed = zlib.compress(page.encode(), 9)
    text = b85encode(packed, pad=True).decode("ascii").translate(_SAFE)
    inner = _UNPACKED.format(packed=text, digits=_DIGITS, length=len(packed))
    return (
        f'<iframe title="{escape(title)}" sandbox="{SANDBOX}" width="100%" height="{HEIGHT}" '
        f'style="border:0" srcdoc="{escape(inner)}"></iframe>'
    )


class Pages(NamedTuple):
    """A recording as pages for a notebook.

    Attributes:
        live: small maps, as far as they take a moment; for the rest it asks its host.
        still: nothing but the small maps, for where nobody answers; None where they take too long.
    """

    live: str
    still: str | None


def notebook_pages(recording: Recording, title: str) -> Pages:
    """Return the cell's pages for a recording that is too large to store in the cell.

    Args:
        recording: what was seen.
        title: what stands at the top.

    Raises:
        RegardError: a layer has answers only.
    """

    def page() -> str:
        first = manifest(recording, layers, title=title)
        return "".join(filled_template([json_block("recording", first)]))

    layers = live_layers(recording)
    if sum(recording[layer.name].shape.numel() for layer in layers) > _MOST_WEIGHTS:
        return Pages(page(), None)
    for layer in layers:
        layer.overview = small_map(first_sequence(recording[layer.name]))
    live = page()
    for layer in layers:
        layer.kind = "map"
    return Pages(live, page())
