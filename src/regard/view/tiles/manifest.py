"""The facts about a recording that the page reads first: tokens, layers, small maps."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any, Literal

import torch
from torch import Tensor

from regard.analysis.head_kinds import Head
from regard.images import Grid, Picture, keep
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.recording import Recording
from regard.text.escaping import visible
from regard.text.tokens import Token
from regard.view.tiles.packing import base64_text, memory

SMALL = 32
_SINKS = ("first-token sink", "separator sink")


@dataclass(frozen=True)
class Opening:
    """A head, and a cell that shows what it does; without a key none does."""

    layer: int
    head: int
    query: int
    key: int | None


@dataclass
class PageLayer:
    """One layer as the page gets it; payload.ts documents each field.

    The file's writer fills in what its block holds; of a live layer the host is asked.
    """

    name: str
    num_heads: int
    q_len: int
    kv_len: int
    place: int = 0
    part: int | None = None  # of a layer whose windows or tiles are apart
    head_numbers: tuple[int, ...] | None = None
    overview: dict[str, Any] | None = None
    heads: list[dict[str, Any] | None] | None = None
    kind: Literal["query-key", "weights", "pyramid", "live"] = "live"
    num_kv_heads: int = 0
    head_dim: int = 0
    scale: float = 1.0
    query_unit: float = 1.0
    key_unit: float = 1.0
    dtype: Literal["float32", "float16"] = "float32"
    deviation: float = 0.0
    spacing: int = 1
    span_heads: int = 0
    block: int = 1
    maximum: float = 0.0
    octaves: float = 0.0
    value_heads: int = 0
    value_dim: int = 0
    value_unit: float = 1.0


def head_records(heads: Iterable[Head | None]) -> list[dict[str, Any] | None]:
    """Heads as the page has them: kind, score, entropy as a share of even attention's, sinks.

    A head whose kind comes from a trial also has ``here``, the kind and score on this text itself.
    None for a head without a kind.

    Example:
        >>> from regard.analysis.head_kinds import Head
        >>> from regard.view.tiles.manifest import head_records
        >>> head_records([Head(0, 0, "self", 0.9, {"self": 0.9, "uniform": 0.25})])
        [{'kind': 'self', 'score': 0.9, 'entropy': 0.25, 'sink': 0}]
    """
    return [
        head
        and {
            "kind": head.kind,
            "score": round(head.score, 4),
            "entropy": round(head.scores.get("uniform", 0.0), 4),
            "sink": round(sum(head.scores.get(name, 0) for name in _SINKS), 4),
            **_here(head),
        }
        for head in heads
    ]


def _here(head: Head) -> dict[str, Any]:
    if head.here is None:
        return {}
    kind, score = head.here
    return {"here": {"kind": kind.name, "score": round(score, 4)}}


def live_layers(recording: Recording) -> list[PageLayer]:
    """Each layer, for a host that answers every question itself; nothing is computed."""
    layers: list[PageLayer] = []
    for index, layer in enumerate(recording.layers):
        num_heads, q_len, kv_len = first_sequence(layer.whole()).shape
        numbers = None if layer.origin is None else layer.origin.heads
        place = layer.model_index(index)
        name, _, part = layer.name.rpartition(" part ")
        apart = int(part) if name and part.isdecimal() else None
        shape = num_heads, q_len, kv_len
        layers.append(PageLayer(layer.name, *shape, place, apart, numbers))
    return layers


def manifest(
    recording: Recording,
    layers: Sequence[PageLayer],
    *,
    title: str | None = None,
    opened: Opening,
    notable: Sequence[Opening] = (),
) -> dict[str, Any]:
    """Return the JSON that the page reads first.

    Args:
        recording: what was seen.
        layers: what the page has of each layer.
        title: what stands at the top; see ``title_of`` when left out.
        opened: where the page opens.
        notable: the heads that stand out.
    """
    return {
        "version": 1,
        "title": title_of(recording) if title is None else title,
        "opened": asdict(opened),
        "notable": [asdict(one) for one in notable],
        "model": recording.model,
        "batch": max(math.prod(layer.shape[:-3]) for layer in recording.layers),
        "one_text": recording.key_tokens == recording.query_tokens,
        "query_tokens": _token_lists(recording.query_tokens),
        "key_tokens": _token_lists(recording.key_tokens),
        "layers": [asdict(layer) for layer in layers],
        # The largest difference of a weight that storing query and key has caused.
        "deviation": max((layer.deviation for layer in layers), default=0.0),
        "refused": [refusal._asdict() for refusal in recording.refused],
        **_pictures(recording),
    }


def _pictures(recording: Recording) -> dict[str, Any]:
    """Return the pictures that the model saw and the grids of their patches, if there are any.

    A page shows the first entry of a batch, and so the pictures of that.
    """
    grids = [
        [grid for grid in recording.layer_grids(layer) if grid.entry == 0]
        for layer in range(len(recording.layers))
    ]
    unique = list(dict.fromkeys(grid for row in grids for grid in row))
    if not unique:
        return {}
    shown = sorted({grid.picture for grid in unique})
    pictures = [recording.pictures[number] for number in shown]
    records: list[dict[str, Any]] = []
    for grid in unique:
        picture = shown.index(grid.picture)
        layers = [layer for layer, row in enumerate(grids) if grid in row]
        some = {} if len(layers) == len(grids) else {"layers": layers}
        records.append(_grid_record(grid, picture, pictures[picture]) | some)
    return {"pictures": [_picture_record(each) for each in pictures], "grids": records}


def _picture_record(picture: Picture) -> dict[str, Any]:
    """Return a picture as the page has it: encoded anew, because a file may hold any bytes."""
    clean = picture if picture.data is None else keep(picture.image())
    data = None if clean.data is None else base64_text(clean.data)
    name, width, height = picture.name, picture.width, picture.height
    return {"name": name, "width": width, "height": height, "type": clean.type, "data": data}


def _grid_record(grid: Grid, number: int, picture: Picture) -> dict[str, Any]:
    """Return a grid as the page has it, its tokens as runs."""
    runs: list[list[int]] = []
    for token in grid.tokens:
        if runs and runs[-1][1] == token:
            runs[-1][1] += 1
        else:
            runs.append([token, token + 1])
    record = {
        "picture": number,
        "rows": grid.rows,
        "columns": grid.columns,
        "box": grid.box or (0, 0, picture.width, picture.height),
        "tokens": runs,
    }
    return record | ({"overlapping": True} if grid.overlapping else {})


def title_of(recording: Recording) -> str:
    """Return the beginning of the text as a title; the name of the model stands beside it.

    Tokens that stand for parts of a picture are no text.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.manifest import title_of
        >>> A = regard.attend(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> title_of(regard.Recording({"layer": A}, query_tokens=["Life", " is"]))
        'Life is'
    """
    patches = patch_keys(recording, 0) if recording.layers else set[int]()
    tokens = [token for key, token in enumerate(recording.key_tokens or ()) if key not in patches]
    text = "".join(token.text for token in tokens[:200] if not token.special)
    return visible(shorten(text, 60, placeholder=" …")) or "Attention"


def add_other(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Add a second recording to what the page reads first; its layers follow those of the first.

    A picture that both have is there once.
    """
    names = ("title", "query_tokens", "key_tokens", "one_text", "refused")
    first["other"] = {"first": len(first["layers"])} | {name: second[name] for name in names}
    if "grids" in second:
        pictures = first.setdefault("pictures", [])
        pictures += [each for each in second["pictures"] if each not in pictures]
        first.setdefault("grids", [])
        first["other"]["grids"] = [
            grid | {"picture": pictures.index(second["pictures"][grid["picture"]])}
            for grid in second["grids"]
        ]
    first["layers"] = [*first["layers"], *second["layers"]]


def first_sequence(matrix: AttentionMatrix) -> AttentionMatrix:
    """Return the first entry of a batch.

    Args:
        matrix: (..., num_heads, q_len, kv_len), or (q_len, kv_len).

    Returns:
        (num_heads, q_len, kv_len): of every other axis the first entry.
    """
    matrix = matrix.detach()
    while matrix.ndim > 3:
        matrix = matrix[0]
    return matrix[None] if matrix.ndim == 2 else matrix


def first_value(value: Tensor) -> Tensor:
    """Return the value of the first entry of a batch.

    Args:
        value: (..., num_kv_heads, kv_len, value_dim), or (kv_len, value_dim).

    Returns:
        (num_kv_heads, kv_len, value_dim).
    """
    while value.ndim > 3:
        value = value[0]
    return value if value.ndim == 3 else value[None]


def sink_keys(recording: Recording, layer: int) -> tuple[int, ...]:
    """Return the keys of a layer that count as sinks: the first one and the special tokens.

    As ``sinksOf`` of the page has them. Tokens that stand for parts of a picture are none.
    """
    tokens = recording.key_tokens
    named = () if tokens is None or len(tokens) != recording.layers[layer].shape[-1] else tokens
    patches = patch_keys(recording, layer)
    special = (key for key, token in enumerate(named) if token.special and key)
    return (0, *(key for key in special if key not in patches))


def patch_keys(recording: Recording, layer: int) -> set[int]:
    """Return the keys of a layer that stand for parts of a picture."""
    grids = recording.layer_grids(layer)
    return {key for grid in grids if grid.entry == 0 for key in grid.tokens}


def _token_lists(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {
        "texts": [token.text for token in tokens],
        "special": [place for place, token in enumerate(tokens) if token.special],
    }


def small_numbers(means: Tensor) -> dict[str, Any]:
    """Return small maps, of the mean weights of their blocks, as levels.

    A mean is maximum * (level / 254)². Level 255 is a mean that is not a number.
    """
    means = means.float()
    known = means.nan_to_num(0.0)
    maximum = float(known.max())
    levels = (known / maximum).sqrt() * 254 if maximum > 0 else known
    return {
        "rows": means.shape[-2],
        "columns": means.shape[-1],
        "maximum": maximum,
        "levels": base64_text(
            memory(levels.round().masked_fill(means.isnan(), 255).to(torch.uint8))
        ),
    }
