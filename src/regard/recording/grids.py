"""Attention to the parts of a picture, from the grids of a layer's tokens."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor

from regard.errors import RegardError, check_index_bounds, check_whole, kind_text, shape_text
from regard.images.patch_grid import Grid
from regard.images.picture import Picture
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Layer, layer_at
from regard.recording.without_keys import without_keys
from regard.reductions.sums import Sum
from regard.scores.score_source import accumulation_dtype
from regard.text import spans
from regard.text.tokens import Token

_ROWS = 64  # rows of weights that are in memory at once

_NO_GRID = (
    "    Give its tokens their places: "
    "seen.with_pictures([image], regard.grid(tokens=range(1, 197), rows=14, columns=14))."
)


def checked_grids(
    layers: Sequence[Layer],
    pictures: Sequence[Picture],
    grids: Grid | Sequence[Grid] | Mapping[str, Sequence[Grid]],
) -> dict[str, tuple[Grid, ...]]:
    """Return the grids of each layer that has some, after checking that they fit.

    Raises:
        TypeError: an element is not a Grid.
        KeyError: no layer has this name.
        ValueError: a grid does not fit its layer or the pictures.
    """
    if isinstance(grids, Mapping):
        pairs = [(layer_at(layers, name), tuple(some)) for name, some in grids.items()]
    else:
        every = (grids,) if isinstance(grids, Grid) else tuple(grids)
        pairs = [(layer, every) for layer in layers]
    for layer, some in pairs:
        _check_fit(layer, some, len(pictures))
    return {layer.name: some for layer, some in pairs if some}


def _check_fit(layer: Layer, grids: Sequence[Grid], num_pictures: int) -> None:
    entries, kv_len = prod(layer.shape[:-3]), layer.shape[-1]
    taken: set[tuple[int, int]] = set()
    for grid in grids:
        if not isinstance(grid, Grid):
            raise TypeError(f"grids has {kind_text(grid)}; each must be one of regard.grid(...).")
        if grid.picture >= num_pictures:
            raise ValueError(
                f"a grid has picture {grid.picture}; there are {num_pictures} pictures.\n"
                "    Count them from 0."
            )
        if max(grid.tokens) >= kv_len or grid.entry >= entries:
            raise ValueError(
                f"a grid has token {max(grid.tokens)} of entry {grid.entry}; layer {layer.name!r} "
                f"has kv_len = {kv_len} and a batch of {entries}.\n"
                "    Layers with other tokens have other grids: pass {name: [grid, ...]}."
            )
        positions = {(grid.entry, token) for token in grid.tokens}
        if positions & taken:
            raise ValueError(
                f"grids have token {min(positions & taken)[1]} twice; a token stands for one part."
            )
        taken |= positions


def boxes_of(layers: Sequence[Layer], grids: Sequence[Grid], pictures: Sequence[Picture]) -> Tensor:
    """Return the box of each key in its picture, (tokens, 4), with NaN for other keys.

    Raises:
        RegardError: there are no grids, or layers have several lengths or batch entries.
    """
    if not grids:
        raise RegardError(f"this recording has no grids of a picture.\n{_NO_GRID}")
    shapes = {(prod(layer.shape[:-3]), layer.shape[-1]) for layer in layers}
    if len(shapes) > 1 or any(grid.entry for grid in grids):
        raise RegardError(
            "boxes are those of one batch entry of layers with one kv_len.\n"
            "    Take one entry, seen.entry(0), or a part, seen.part(layers)."
        )
    boxes = torch.full((layers[0].shape[-1], 4), torch.nan, device="cpu")
    for grid in grids:
        picture = pictures[grid.picture]
        boxes[list(grid.tokens)] = grid.boxes(picture.width, picture.height)
    return boxes


def image_of(
    layer: Layer,
    tokens: tuple[Sequence[Token] | None, Sequence[Token] | None],
    *,
    head: int | None,
    query: int | str | Sequence[int] | None,
    grid: int | None,
    without: Sequence[int | str],
) -> Tensor:
    """Return the attention to each part of a picture; see ``Recording.image``."""
    grids = layer.grids
    if not grids:
        raise RegardError(
            f"layer {layer.name!r} has no grid: no places of its tokens are known.\n{_NO_GRID}"
        )
    if prod(layer.shape[:-3]) > 1:
        raise ValueError(
            f"layer {layer.name!r} has shape {shape_text(layer.shape)}; image() looks at one entry "
            "of a batch.\n    Take one of them, seen.entry(0)."
        )
    if grid is not None:
        index = check_index_bounds(check_whole("grid", grid), len(grids), 0)
        grids = grids[index : index + 1]
    rows = _rows(layer, tokens[0], query)
    out = _positions("without", tokens[1], without, layer.shape[-1])
    matrix = layer.whole()
    while matrix.ndim > 3:
        matrix = matrix[0]
    if head is not None and matrix.ndim > 2:
        matrix = matrix[check_index_bounds(check_whole("head", head), matrix.shape[0], 0)]
    by_key = _mean_of_rows(matrix, rows, out)  # (..., kv_len)
    by_key = by_key.mean(0) if by_key.ndim > 1 else by_key
    parts = [by_key[list(each.tokens)] for each in grids]
    return parts[0].view(grids[0].rows, -1) if len(parts) == 1 else torch.cat(parts)


def _rows(
    layer: Layer, tokens: Sequence[Token] | None, query: int | str | Sequence[int] | None
) -> list[int] | None:
    """Return the rows of a query; None for all."""
    if query is None:
        return None
    start, ran = layer.positions.start, layer.positions.start + layer.shape[-2]
    if layer.queries is not None:
        ran = layer.queries.ran
    if isinstance(query, str):
        return _positions("query", tokens, [query], layer.shape[-2])
    some = query if isinstance(query, Sequence) else [query]
    rows = [check_index_bounds(check_whole("query", each), ran, 0) - start for each in some]
    missing = [row + start for row in rows if not 0 <= row < layer.shape[-2]]
    if missing or not rows:
        raise IndexError(
            f"query is {missing[0] if missing else 'empty'}; layer {layer.name!r} has queries "
            f"{start} to {start + layer.shape[-2] - 1}."
        )
    return rows


def _positions(
    name: str, tokens: Sequence[Token] | None, wanted: Sequence[int | str], length: int
) -> list[int]:
    """Return the positions of tokens that are given as positions or as texts."""
    if isinstance(wanted, str):
        raise TypeError(f"{name} is a string; it must be a list.\n    Pass [{wanted!r}].")
    positions: list[int] = []
    for each in wanted:
        if not isinstance(each, str):
            positions.append(check_index_bounds(check_whole(name, each), length, 0))
            continue
        if tokens is None:
            raise ValueError(
                f"{name} is {each!r}; the recording has no tokens to find it in.\n"
                "    Give it some, seen.with_tokens(tokens), or pass positions."
            )
        # Every special token with this text, or one word: "dog#2" is the second of two.
        special = [at for at, token in enumerate(tokens) if token == Token(each, special=True)]
        words = {} if special or all(token.special for token in tokens) else spans.by_word(tokens)
        if not special and each not in words:
            raise ValueError(
                f"{name} is {each!r}; no token and no word of the recording has that text.\n"
                "    Pass a word of the text, the text of a special token, or a position; those of "
                "patches are in seen.grids."
            )
        positions += special or range(*words[each])
    return positions


def _mean_of_rows(
    matrix: AttentionMatrix, rows: Sequence[int] | None, out: Sequence[int]
) -> Tensor:
    """Return the mean of some rows, (..., kv_len), with a few rows in memory at a time."""
    matrix = without_keys(matrix, out)
    if rows is None:
        return cast(Tensor, matrix.reduce(Sum(-2))) / matrix.shape[-2]
    dtype = accumulation_dtype(matrix.dtype)
    total = torch.zeros((), dtype=dtype, device=matrix.device)
    for first in range(0, len(rows), _ROWS):
        total = total + matrix[..., list(rows[first : first + _ROWS]), :].to(dtype).sum(-2)
    return total / len(rows)
