"""The page inside another page: a frame that can run its script and reach nothing around it."""

import zlib
from base64 import b64encode
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


# A notebook keeps every page that it shows: compressed, one takes a third of its size.
_UNPACKED = """<!doctype html>
<meta charset="utf-8">
<script type="text/plain" id="page">{packed}</script>
<script>
(async () => {{
  const text = document.getElementById("page").textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
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
    packed = b64encode(zlib.compress(page.encode(), 9)).decode("ascii")
    return (
        f'<iframe title="{escape(title)}" sandbox="{SANDBOX}" width="100%" height="{HEIGHT}" '
        f'style="border:0" srcdoc="{escape(_UNPACKED.format(packed=packed))}"></iframe>'
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
        told = manifest(recording, layers, title=title)
        return "".join(filled_template([json_block("recording", told)]))

    layers = live_layers(recording)
    if sum(recording[layer.name].shape.numel() for layer in layers) > _MOST_WEIGHTS:
        return Pages(page(), None)
    for layer in layers:
        layer.overview = small_map(first_sequence(recording[layer.name]))
    live = page()
    for layer in layers:
        layer.kind = "map"
    return Pages(live, page())
