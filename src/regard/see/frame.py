"""The page inside another page: a frame that can run its script and reach nothing around it."""

from html import escape

from regard.recording import Recording
from regard.see.manifest import first_sequence, live_layers, manifest, small_map
from regard.see.template import filled_template, json_block

__all__ = ["HEIGHT", "SANDBOX", "framed", "live_page"]

HEIGHT = 680
"""Pixels."""
SANDBOX = "allow-scripts allow-downloads"
# A few seconds of work.
_MOST_WEIGHTS = 2**28


def framed(page: str, title: str) -> str:
    """An iframe that holds a page whole, as HTML.

    Args:
        page: HTML.
        title: for those who do not see it.

    Example:
        >>> from regard.see.frame import framed
        >>> framed("<p>", 'a "model"').partition(" srcdoc=")[2]
        '"&lt;p&gt;"></iframe>'
    """
    return (
        f'<iframe title="{escape(title)}" sandbox="{SANDBOX}" width="100%" height="{HEIGHT}" '
        f'style="border:0" srcdoc="{escape(page)}"></iframe>'
    )


def live_page(recording: Recording, title: str) -> str:
    """The page without numbers but small maps, as far as they take a moment: it asks its host.

    Args:
        recording: what was seen.
        title: what stands at the top.

    Raises:
        RegardError: a layer has answers only.

    Example:
        >>> import torch, regard
        >>> from regard.see.frame import live_page
        >>> A = regard.attend(torch.zeros(3, 1), torch.zeros(3, 1))
        >>> '"kind":"live"' in live_page(regard.Recording({"layer": A}), "A run")
        True
    """
    layers = live_layers(recording)
    if sum(recording[layer.name].shape.numel() for layer in layers) <= _MOST_WEIGHTS:
        for layer in layers:
            layer.overview = small_map(first_sequence(recording[layer.name]))
    told = manifest(recording, layers, title=title)
    return "".join(filled_template([json_block("recording", told)]))
