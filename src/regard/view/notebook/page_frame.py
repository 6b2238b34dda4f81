"""The page inside another page: a frame that can run its script and reach nothing around it."""

import zlib
from base64 import b64encode
from html import escape

HEIGHT = 680
"""Pixels."""
SANDBOX = "allow-scripts allow-downloads"
# A notebook keeps every page that it shows: compressed, one takes under half of its size.
_UNPACKED = """<!doctype html>
<meta charset="utf-8">
<script type="text/plain" id="page">{packed}</script>
<script>
(async () => {{
  const text = atob(document.getElementById("page").textContent);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
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
    """
    packed = b64encode(zlib.compress(page.encode(), 9)).decode("ascii")
    inner = _UNPACKED.format(packed=packed)
    return (
        f'<iframe title="{escape(title)}" sandbox="{SANDBOX}" width="100%" height="{HEIGHT}" '
        f'style="border:0" srcdoc="{escape(inner)}"></iframe>'
    )
