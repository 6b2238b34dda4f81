"""The kinds of a layer's heads, or that they cannot be told, which leaves other layers theirs."""

from collections.abc import Sequence
from dataclasses import replace

from regard.analysis.head_classes import classify
from regard.analysis.head_kinds import Head
from regard.errors import RegardError
from regard.recording.layers import Layer
from regard.text.tokens import Token

__all__ = ["known_kinds"]


def known_kinds(
    layer: Layer,
    place: int,
    query_tokens: Sequence[Token] | None,
    key_tokens: Sequence[Token] | None,
) -> list[Head | None]:
    """Every head of one layer with its kind; None for each where the layer has a NaN.

    Args:
        layer: with the answers that tell the kinds, or that can be asked.
        place: of the layer in its recording.
        query_tokens: as for ``classify``.
        key_tokens: likewise.
    """
    try:
        heads = classify([layer], query_tokens, key_tokens)
    except RegardError:
        return [None] * (layer.shape[-3] if len(layer.shape) > 2 else 1)
    return [replace(head, layer=layer.place(place)) for head in heads]
