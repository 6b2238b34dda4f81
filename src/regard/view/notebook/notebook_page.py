"""The page in a notebook: whole in the cell while it is small, else asking the kernel as it needs.

Either way it stands in a frame of its own that may run its script and nothing else: it cannot reach
the notebook, and no style of the one changes the other.
"""

import os
import sys
from collections.abc import Iterable
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from regard.errors import check_numbers, kind_text
from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.notebook_hook import register_notebook_view
from regard.recording.file_reader import load
from regard.recording.recording import Recording
from regard.text.tokens import Token
from regard.view.export.page_file import write_page
from regard.view.notebook.page_frame import framed
from regard.view.tiles.manifest import title_of

# What a cell holds whole: so many numbers of query and key, about 2 MB, and so many weights, of
# which the small maps are the means, a second or two of work.
_MOST_NUMBERS = 2**19
_MOST_WEIGHTS = 2**26
_WITHOUT_ANYWIDGET = (
    "This is too large to stand in the notebook whole. Run <code>pip install anywidget</code> and "
    "restart the kernel to look at it here, or write it as a file: <code>regard.page(seen, "
    "&quot;attention.html&quot;)</code>."
)


def show(
    x: Recording | AttentionMatrix | Tensor | str | os.PathLike[str],
    tokens: Iterable[Token | str] | None = None,
    key_tokens: Iterable[Token | str] | None = None,
) -> None:
    """Show attention as the page: in a notebook's cell, elsewhere as a file.

    The file is ``attention.html`` in the working folder, as ``regard see`` writes it; the next call
    replaces it. ``regard.page`` writes to a place of your choice.

    In a notebook small recordings are in the cell whole, and stay when the kernel has ended; larger
    ones ask the kernel for what they show, which needs anywidget.

    Args:
        x: a recording or the path of one, an AttentionMatrix, or a tensor of weights,
            (..., num_heads, q_len, kv_len).
        tokens: one for each query; the recording's own when left out.
        key_tokens: one for each key; the same as the queries' when left out.

    Raises:
        TypeError: x is something else, or the tokens are none.
        ValueError: x is a tensor whose rows are no weights, or the tokens are too few or too many.
        RegardError: the recording is empty, or has answers only.
        OSError: the file cannot be written.

    Example:
        >>> import torch, regard
        >>> weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
        >>> regard.show(weights, tokens=["Life", " is"])
        The page is in file:///...attention.html
    """
    seen = _as_recording(x, tokens, key_tokens)
    if is_notebook():
        import_module("IPython.display").display(_drawn(seen), raw=True)
        return
    page = write_page(seen, "attention.html")
    sys.stdout.write(f"The page is in {page.resolve().as_uri()}\n")


def bundle(x: Recording | AttentionMatrix) -> dict[str, Any]:
    """Return the MIME bundle that IPython shows for a matrix or a recording.

    Args:
        x: what stands in the cell.

    Returns:
        Nothing outside a notebook, and where there is nothing to draw: the text stands then.
    """
    if not is_notebook():
        return {}
    seen = _as_recording(x)
    whole = seen.part([layer.name for layer in seen.layers if layer.matrix is not None])
    return _drawn(whole) | {"text/plain": repr(x)} if whole else {}


def is_notebook() -> bool:
    """Return True if a Jupyter kernel runs this, so that cells show more than text."""
    return "ipykernel" in sys.modules and import_module("IPython").get_ipython() is not None


def _as_recording(
    x: Recording | AttentionMatrix | Tensor | str | os.PathLike[str],
    tokens: Iterable[Token | str] | None = None,
    key_tokens: Iterable[Token | str] | None = None,
) -> Recording:
    """Return x itself, a loaded file, or a recording of one layer."""
    if isinstance(x, str | os.PathLike):
        x = load(Path(x))
    if isinstance(x, Tensor):
        x = AttentionMatrix.from_weights(x)
    if isinstance(x, AttentionMatrix):
        check_numbers("x", x.device)
        return Recording({"attention": x}, query_tokens=tokens, key_tokens=key_tokens)
    if not isinstance(x, Recording):
        raise TypeError(
            f"x is {kind_text(x)}; it must be a recording or its path, an AttentionMatrix, or a "
            "tensor of weights.\n    Use torch.as_tensor(x) for an array of weights."
        )
    if tokens is None and key_tokens is None:
        return x
    return x.with_tokens((x.query_tokens or ()) if tokens is None else tokens, key_tokens)


def _drawn(seen: Recording) -> dict[str, Any]:
    """By kinds of media; a front end takes the richest that it knows."""
    title = title_of(seen)
    text = {"text/plain": repr(seen)}
    if _is_small(seen):
        with TemporaryDirectory(prefix="regard-") as folder:
            page = write_page(seen, Path(folder, "page.html")).read_text("ascii")
        return text | {"text/html": framed(page, title)}
    if find_spec("anywidget") is None:
        return text | {"text/html": f"<p>{_WITHOUT_ANYWIDGET}</p><pre>{escape(repr(seen))}</pre>"}
    from regard.view.notebook import widget  # needs anywidget, which is optional

    return widget.view(seen, title) | text


def _is_small(seen: Recording) -> bool:
    matrices = [seen[name] for name in seen]
    numbers = sum(tensor.numel() for matrix in matrices for tensor in matrix.source.tensors)
    return numbers <= _MOST_NUMBERS and sum(m.shape.numel() for m in matrices) <= _MOST_WEIGHTS


register_notebook_view(bundle)
