"""The mass of spans of queries on spans of keys, given the norms of the rows.

The cells of a pooled map are such spans, too. On both axes the spans are cut into parts of at most
a tile, and a tile holds as many slots of one width as fit: one part of 128 tokens, or four parts
of up to 32. Slots have four widths, and there is one launch for each of row slots beside each of
column slots. A program owns the parts of one tile of rows and reads those of the columns one tile
after another; the parts of one span of keys are added in its registers, and those of one span of
queries by a second kernel, in order: no atomics.

A tile of m queries x n keys costs 2 m n d FLOPs, m n exps, n d numbers read and three operations
for each score. Floor: 0.5 of a forward for d = 128, 1 for d = 64, where spans fill their slots.
They fill more than a quarter, half where a span is one token, so spans that cover each token once
cost at most sixteen times as much, usually four, beside the tiles of each launch that hold few
parts.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false

import triton
import triton.language as tl

from regard.backends.triton.tile import (
    FAR,
    allowed_at,
    document,
    keys_seen,
    kv_end_of,
    norms_of,
    rows_of,
    scores,
    tile_of,
    weights_of,
)


@triton.jit
def _slots(parts, count, tile, BLOCK: tl.constexpr, SLOT: tl.constexpr):
    """Return the token at each position of a tile, and True where there is one."""
    place = tl.arange(0, BLOCK)
    part = tile * (BLOCK // SLOT) + place // SLOT
    exists = part < count
    token = tl.load(parts + 4 * part, mask=exists, other=0) + place % SLOT
    return token, place % SLOT < tl.load(parts + 4 * part + 1, mask=exists, other=0)


@triton.jit
def _tiles_met(parts, count, start, stop, PER_TILE: tl.constexpr):
    """Return the first, and one past the last, tile with a part that overlaps these tokens."""
    first, last = start * 0 + FAR, start * 0 - 1
    for at in range(0, count, 256):
        part = at + tl.arange(0, 256)
        begin = tl.load(parts + 4 * part, mask=part < count, other=0)
        length = tl.load(parts + 4 * part + 1, mask=part < count, other=0)
        meets = (begin < stop) & (begin + length > start) & (length > 0)
        first = tl.minimum(first, tl.min(tl.where(meets, part, FAR), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, part, -1), 0))
    return first // PER_TILE, (last + PER_TILE) // PER_TILE


# For numbers that differ from text to text, 1 and multiples of 16 take no kernels of their own.
@triton.jit(do_not_specialize=["row_count", "column_count", "height", "width"])
def pooled_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    norms,
    rows,
    columns,
    row_count,
    column_count,
    sums,
    height,
    width,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_SLOT: tl.constexpr,
    COLUMN_SLOT: tl.constexpr,
):
    """Sum one tile of parts of rows into ``sums``, zeros of (batch, num_heads, height, width).

    rows and columns are int32, (parts, 4): the first token, how many there are, at most a slot,
    the row or the column of the sums, and 1 where a part is the first of its span. The parts of
    a span are neighbours; those of rows have a row each, those of columns one column.
    """
    PER_ROWS: tl.constexpr = BLOCK_M // ROW_SLOT
    PER_COLUMNS: tl.constexpr = BLOCK_N // COLUMN_SLOT
    tiles = tl.cdiv(row_count, PER_ROWS)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // shape.num_heads
    head = tl.program_id(0) // tiles % shape.num_heads
    q_idx, here = _slots(rows, row_count, tile, BLOCK_M, ROW_SLOT)
    at = (batch * shape.num_heads + head).to(tl.int64)
    top, above = norms_of(norms, at * shape.q_len + q_idx, here)
    q = rows_of(query, batch, head + 0 * q_idx, q_idx, here, HEAD_DIM)
    kv_end = kv_end_of(limits, batch, head, shape)
    q_first, q_last = tl.min(tl.where(here, q_idx, FAR), 0), tl.max(tl.where(here, q_idx, -1), 0)
    start, stop, every_start, every_stop = keys_seen(q_first, q_last, kv_end, limits, packed)
    of_query = q_idx
    if limits.first is not None:
        of_query, its_stop = document(limits, batch, head, q_idx + limits.shift, here)
        start = tl.maximum(start, tl.min(tl.where(of_query < 0, FAR, of_query), 0))
        stop = tl.minimum(stop, tl.max(its_stop, 0))
    rows_whole = tl.min(here.to(tl.int32), 0) > 0
    part_of_row = tile * PER_ROWS + tl.arange(0, PER_ROWS)
    row_exists = part_of_row < row_count
    row = tl.load(rows + 4 * part_of_row + 2, mask=row_exists, other=0)
    into = sums + (at * height + row.to(tl.int64)[:, None]) * width
    # Only a span that fills whole tiles has several parts. float32 would drift over a thousand.
    total = tl.zeros((BLOCK_M, PER_COLUMNS), tl.float64 if PER_COLUMNS == 1 else tl.float32)
    met, end = _tiles_met(columns, column_count, start, stop, PER_COLUMNS)
    for across in range(met, end):
        if PER_COLUMNS == 1:  # one part, whose keys are neighbours
            kv_first = tl.load(columns + 4 * across)
            length = tl.load(columns + 4 * across + 1)
            kv_idx = kv_first + tl.arange(0, BLOCK_N)
            kv_last = kv_first + length - 1
            there = kv_idx <= kv_last
            whole = rows_whole & (length == BLOCK_N)
            keys = tile_of(key, batch, head // GROUP, kv_first, kv_last + 1, HEAD_DIM, BLOCK_N)
        else:
            kv_idx, there = _slots(columns, column_count, across, BLOCK_N, COLUMN_SLOT)
            kv_first = tl.min(tl.where(there, kv_idx, FAR), 0)
            kv_last = tl.max(tl.where(there, kv_idx, -1), 0)
            whole = rows_whole & (tl.min(there.to(tl.int32), 0) > 0)
            keys = rows_of(key, batch, head // GROUP + 0 * kv_idx, kv_idx, there, HEAD_DIM)
        x = scores(
            q, keys.T, q_idx[:, None], kv_idx[None, :], batch, head, shape, steps, bias, UPCAST
        )
        edge = (kv_first < every_start) | (kv_last >= every_stop) | (whole == 0)
        if edge:
            of_key = kv_idx
            if limits.first is not None:
                of_key, _ = document(limits, batch, head, kv_idx, there & (kv_idx < kv_end))
            seen = allowed_at(
                q_idx[:, None], kv_idx[None, :], of_query[:, None], of_key[None, :], kv_end, batch,
                head, shape, limits, packed,
            )  # fmt: skip
            x = tl.where(seen & here[:, None] & there[None, :], x, float("-inf"))
        weights = weights_of(x, top[:, None], above[:, None], steps)
        # In a row of NaN not even a score of -inf makes 0.
        if edge | (bias.pointer is not None):
            weights = tl.where(x == float("-inf"), 0.0, weights)
        closes = True
        if PER_COLUMNS == 1:
            total = tl.where(tl.load(columns + 4 * across + 3) != 0, 0.0, total)
            total += tl.sum(weights, 1)[:, None]
            # The mask may hide the last parts of a span.
            at_end = across + 1 >= end
            closes = at_end | (tl.load(columns + 4 * across + 7, mask=at_end == 0, other=1) != 0)
        else:
            total = tl.sum(tl.reshape(weights, (BLOCK_M, PER_COLUMNS, COLUMN_SLOT)), 2)
        if closes:
            mass = tl.sum(tl.reshape(total, (PER_ROWS, ROW_SLOT, PER_COLUMNS)), 1)
            part = across * PER_COLUMNS + tl.arange(0, PER_COLUMNS)
            exists = part < column_count
            span = tl.load(columns + 4 * part + 2, mask=exists, other=0)
            stored = row_exists[:, None] & exists[None, :]
            tl.store(into + span[None, :], mass, mask=stored)


@triton.jit(do_not_specialize=["parts", "spans", "width"])
def joined_kernel(sums, begins, ends, answers, parts, spans, width, BLOCK: tl.constexpr):
    """Add the parts of one span of queries of one head, in order and in float64.

    sums is (batch, num_heads, parts, width), answers (batch, num_heads, spans, width); the parts
    of span i are begins[i] to ends[i].
    """
    at, span = (tl.program_id(0) // spans).to(tl.int64), tl.program_id(0) % spans
    begin, end = tl.load(begins + span), tl.load(ends + span)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float64)
        for part in range(begin, end):
            total += tl.load(sums + (at * parts + part) * width + column, mask=column < width)
        tl.store(answers + (at * spans + span) * width + column, total, mask=column < width)


@triton.jit(do_not_specialize=["spans", "width"])
def added_kernel(sums, begins, ends, answers, spans, width, BLOCK: tl.constexpr):
    """Add the sums of one span of keys in one row, in float64.

    sums is (rows, width), answers (rows, spans); those of span i are begins[i] to ends[i].
    """
    row, span = (tl.program_id(0) // spans).to(tl.int64), tl.program_id(0) % spans
    begin, end = tl.load(begins + span), tl.load(ends + span)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(sums + row * width + column, mask=column < end, other=0.0)
    tl.store(answers + row * spans + span, tl.sum(total, 0))
