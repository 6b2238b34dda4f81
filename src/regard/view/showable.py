"""Whatever holds attention, as the recording that every view shows."""

import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from regard.errors import check_numbers, kind_text
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.file_reader import load
from regard.recording.recording import Recording
from regard.text.tokens import Token

__all__ = ["Showable", "as_recording"]

Showable = Recording | AttentionMatrix | Tensor | str | os.PathLike[str]
"""A recording or the path of one, a matrix, or a tensor of weights from any tool."""


def as_recording(
    x: Showable,
    tokens: Iterable[Token | str] | None = None,
    key_tokens: Iterable[Token | str] | None = None,
) -> Recording:
    """Return a recording of x: x itself, a loaded file, or a recording of one layer.

    Args:
        x: what to show.
        tokens: one for each query; the recording's own when left out.
        key_tokens: one for each key; the same as the queries' when left out.

    Raises:
        TypeError: x is something else, or the tokens are none.
        ValueError: x is a tensor whose rows are no weights; or the tokens are too few or too many.
    """
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
