"""The mask of several calls put together: each row sees what it saw in its call, and no more.

Where that is a band beside hidden keys (causal, a sliding window, padding), the mask is made of
these words, which cost nothing to keep and make answers cheap; else it is a bool for each query and
key.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.capture.generation import Order
from regard.masks import And, Causal, Keep, Mask, Not, Or, RowSlice, SlidingWindow
from regard.masks.bands import Band
from regard.masks.flex import BlockSparse, MaskMod
from regard.masks.row_slice import row_slice_of
from regard.scores.box import Box

__all__ = ["Piece", "joined_mask", "reordered", "signature"]


class Piece(NamedTuple):
    """The mask of a call, and where its rows and columns lie in the whole.

    Attributes:
        mask: bound to (..., num_heads, rows, kv_len) of the call; None: all keys.
        first: its first row.
        rows: how many it has.
        base: its first column.
        kv_len: how many columns it has.
        order: for each entry of the batch, at the end, which it was in this call; None: the same.
    """

    mask: Mask | None
    first: int
    rows: int
    base: int
    kv_len: int
    order: Order | None = None


class _Spans(NamedTuple):
    """The keys that rows see: from first to last (one past it), among those that columns allow.

    Of shapes (rows,), (rows,) and (..., 1, kv_len); no columns: all.
    """

    first: Tensor
    last: Tensor
    columns: Tensor | None


def signature(mask: Mask | None) -> Hashable:
    """Return a key that is equal for masks of one kind that are made of the same tensors."""
    match mask:
        case None:
            return None
        case And(first, second) | Or(first, second):
            return (type(mask), signature(first), signature(second))
        case Not(inner):
            return (Not, signature(inner))
        case RowSlice(inner, start, q_len):
            return (RowSlice, signature(inner), start, q_len)
        case MaskMod() | BlockSparse():
            return id(mask)  # what a callable reads is not known
        case _:
            return (mask.text, *map(id, mask.tensors))


def joined_mask(pieces: Sequence[Piece], shape: torch.Size, rows: range) -> Mask | None:
    """Return the mask of the rows of all pieces.

    Args:
        pieces: in the order of their rows, which are neighbours.
        shape: (..., num_heads, q_len, kv_len) with every query that ran, kept or not.
        rows: the places of the rows among all queries.

    Returns:
        The mask, bound to (..., num_heads, len(rows), kv_len); None: every row sees every key.
    """
    spans = [_spans_of(piece, shape) for piece in pieces]
    columns, fitting = _columns(pieces, spans, shape)
    first = torch.cat(
        [_moved(span and span.first, p) for span, p in zip(spans, pieces, strict=True)]
    )
    last = torch.cat([_moved(span and span.last, p) for span, p in zip(spans, pieces, strict=True)])
    if all(fitting):
        counts = torch.nn.functional.pad(_any_leading(columns)[0].cumsum(0), (1, 0)).cpu()
        ends = counts[first], counts[last]
        for band in _bands(first, shape, rows):
            said = _band_ends(band, shape, rows)
            if _alike(ends, (counts[said[0]], counts[said[1]])):
                hidden = [] if bool(columns.all()) else [Keep(columns)]
                return _rows_of_all([*band, *hidden], rows, shape[-2])
    return Keep(_dense(pieces, fitting, columns, first, last, shape))


def reordered(tensor: Tensor, order: Order | None) -> Tensor:
    """Return the entries of the batch as they are at the end."""
    if order is None or tensor.ndim < 4 or tensor.shape[0] == 1:
        return tensor
    return tensor.index_select(0, torch.tensor(order, device=tensor.device))


# What the rows of one call see


def _spans_of(piece: Piece, shape: torch.Size) -> _Spans | None:
    size = torch.Size((*shape[:-2], piece.rows, piece.kv_len))
    spans = _spans(piece.mask, size)
    if spans is None:
        return None
    # A query of padding can have looked at the empty room of a cache.
    low, high, columns = 0, shape[-1] - piece.base, spans.columns
    if columns is not None:
        seen = _any_leading(columns)[0].nonzero()
        low, high = (int(seen[0]), min(int(seen[-1]) + 1, high)) if len(seen) else (0, 0)
        columns = reordered(columns, piece.order)
    first = spans.first.clamp(low, max(low, high))
    return _Spans(first, torch.maximum(spans.last.clamp(max=high), first), columns)


def _spans(mask: Mask | None, shape: torch.Size) -> _Spans | None:
    """Return what the rows of a bound mask see; None where that is no span for each row."""
    q_len, kv_len = shape[-2:]
    everything = _Spans(
        torch.zeros(q_len, device="cpu").long(), torch.full((q_len,), kv_len, device="cpu"), None
    )
    match mask:
        case None:
            return everything
        case Band():
            low, high = mask.limits(shape)
            q_idx = torch.arange(q_len, device="cpu")
            first = everything.first if low is None else (q_idx + low).clamp(0, kv_len)
            return _Spans(first, torch.maximum((q_idx + high + 1).clamp(0, kv_len), first), None)
        case Keep(allowed) if allowed.shape[-2] == 1:
            return everything._replace(columns=allowed.expand(*allowed.shape[:-1], kv_len))
        case RowSlice(inner, start, whole):
            spans = _spans(inner, torch.Size((*shape[:-2], whole, kv_len)))
            rows = slice(start, start + q_len)
            return spans and _Spans(spans.first[rows], spans.last[rows], spans.columns)
        case And(one, other):
            pair = _spans(one, shape), _spans(other, shape)
            if pair[0] is None or pair[1] is None:
                return _factored(mask, shape)
            return _overlap(pair[0], pair[1])
        case _:
            return _factored(mask, shape)


def _overlap(one: _Spans, other: _Spans) -> _Spans:
    first = torch.maximum(one.first, other.first)
    last = torch.maximum(torch.minimum(one.last, other.last), first)
    both = [columns for columns in (one.columns, other.columns) if columns is not None]
    return _Spans(first, last, both[0] & both[1] if len(both) == 2 else (both or [None])[0])


def _factored(mask: Mask, shape: torch.Size) -> _Spans | None:
    """Return the spans and hidden columns of a mask of any kind; None if it has others."""
    allowed = _allowed(mask, shape)
    columns, hull = allowed.any(-2, keepdim=True), _any_leading(allowed)
    seen = hull.any(-1)
    first = torch.where(seen, hull.byte().argmax(-1), 0)
    last = torch.where(seen, shape[-1] - hull.flip(-1).byte().argmax(-1), 0)
    same = torch.equal((_within(first, last, shape[-1]) & columns).expand_as(allowed), allowed)
    return _Spans(first.cpu(), last.cpu(), columns) if same else None


def _allowed(mask: Mask, shape: torch.Size) -> Tensor:
    """Return the whole mask of a call: every axis, those of batch and heads full or 1."""
    everywhere = tuple(slice(0, n) for n in shape)
    device = mask.tensors[0].device if mask.tensors else torch.device("cpu")
    block = mask.block(Box(everywhere[:-2], everywhere[-2], everywhere[-1]), shape, device)
    block = block[(None,) * (len(shape) - block.ndim)]
    return block.expand(*block.shape[:-2], *shape[-2:])


def _any_leading(allowed: Tensor) -> Tensor:
    """Return which keys some entry of the batch or head sees, (rows, kv_len)."""
    return allowed.reshape(-1, *allowed.shape[-2:]).any(0)


def _within(first: Tensor, last: Tensor, kv_len: int) -> Tensor:
    """Return a mask that is True from first to last, (rows, kv_len)."""
    kv_idx = torch.arange(kv_len, device=first.device)
    return (kv_idx >= first[:, None]) & (kv_idx < last[:, None])


# The whole


def _columns(
    pieces: Sequence[Piece], spans: Sequence[_Spans | None], shape: torch.Size
) -> tuple[Tensor, list[bool]]:
    """Return which keys are hidden from all, and which calls see what it and their spans say."""
    given = [spans.columns for spans in spans if spans is not None and spans.columns is not None]
    ones = (1,) * (len(shape) - 2)
    leading = _broadcast([ones, *(columns.shape[:-2] for columns in given)])
    device = given[0].device if given else torch.device("cpu")
    columns = torch.ones(*leading, 1, shape[-1], dtype=torch.bool, device=device)
    known, fitting = 0, list[bool]()
    for piece, span in zip(pieces, spans, strict=True):
        if span is None:
            fitting.append(False)
            continue
        seen = span.last > span.first
        start = int(span.first[seen].min()) if bool(seen.any()) else 0
        stop = int(span.last[seen].max()) if bool(seen.any()) else 0
        own = columns.new_ones(1) if span.columns is None else span.columns[..., start:stop]
        there = columns[..., piece.base + start : piece.base + stop]
        own = own.expand_as(there)
        old = max(min(known - piece.base - start, stop - start), 0)
        fits = torch.equal(there[..., :old], own[..., :old])
        fitting.append(fits)
        if fits:
            there[..., old:] = own[..., old:]
            known = max(known, piece.base + stop)
    return columns, fitting


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the joint sizes of axes of several tensors, each full or 1."""
    return tuple(max(axis) for axis in zip(*shapes, strict=True))


def _moved(ends: Tensor | None, piece: Piece) -> Tensor:
    return torch.zeros(piece.rows, device="cpu").long() if ends is None else ends + piece.base


def _rows_of_all(masks: Sequence[Mask], rows: range, q_len: int) -> Mask | None:
    """Return the rows of masks that must all allow; None: there are none."""
    if not masks:
        return None
    return row_slice_of(masks[0] if len(masks) == 1 else And(*masks), rows, q_len)


def _bands(first: Tensor, shape: torch.Size, rows: range) -> Iterator[list[Band]]:
    """Yield what the rows may be, the simplest first."""
    yield []
    yield [Causal()]
    at = torch.arange(rows.start, rows.stop, device="cpu") + shape[-1] - shape[-2]
    left = int((at - first).max())
    if left >= 0:
        yield [SlidingWindow(left, 0)]


def _band_ends(band: list[Band], shape: torch.Size, rows: range) -> tuple[Tensor, Tensor]:
    """Return the first key of each row in a band, and one past the last."""
    spans = _spans(row_slice_of(band[0], rows, shape[-2]) if band else None, _sized(shape, rows))
    assert spans is not None
    return spans.first, spans.last


def _sized(shape: torch.Size, rows: range) -> torch.Size:
    return torch.Size((*shape[:-2], len(rows), shape[-1]))


def _alike(ends: tuple[Tensor, Tensor], said: tuple[Tensor, Tensor]) -> bool:
    """Return True if rows see the same keys; ends count those that are not hidden from all."""
    empty = (ends[0] == ends[1]) & (said[0] == said[1])
    return bool((empty | (ends[0] == said[0]) & (ends[1] == said[1])).all())


def _dense(
    pieces: Sequence[Piece],
    fitting: Sequence[bool],
    columns: Tensor,
    first: Tensor,
    last: Tensor,
    shape: torch.Size,
) -> Tensor:
    """Return the allowed keys, (..., rows, kv_len), each leading axis full or 1."""
    device = columns.device
    blocks: dict[int, Tensor] = {}
    for place, (piece, fits) in enumerate(zip(pieces, fitting, strict=True)):
        if not fits:
            size = torch.Size((*shape[:-2], piece.rows, piece.kv_len))
            allowed = (
                torch.ones(1, device="cpu") if piece.mask is None else _allowed(piece.mask, size)
            )
            blocks[place] = reordered(allowed.bool(), piece.order).to(device)
    leading = _broadcast([columns.shape[:-2], *(block.shape[:-2] for block in blocks.values())])
    dense = (_within(first.to(device), last.to(device), shape[-1]) & columns).expand(
        *leading, len(first), shape[-1]
    )
    if not blocks:
        return dense
    dense, row = dense.clone(), 0
    for place, piece in enumerate(pieces):
        if place in blocks:
            dense[..., row : row + piece.rows, :] = False
            at = slice(piece.base, piece.base + piece.kv_len)
            dense[..., row : row + piece.rows, at] = blocks[place][..., : shape[-1] - piece.base]
        row += piece.rows
    return dense
