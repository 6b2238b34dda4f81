"""Numbers of single entries, given the norms of the rows: some weights, and the visible keys.

The weights at a distance, or in a few columns, are products of single queries and keys. A tile of
m rows with n entries each costs 2 m n d FLOPs outside the matrix units, and m n d numbers read. To
count the keys that a row sees, all scores of the row are computed again.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from regard.backends.triton.tile import (
    FAR,
    LOG2E,
    entries_seen,
    kv_end_of,
    norms_of,
    packed_rows,
    products_at,
    rows_seen,
    stepped,
    tile_by_rows,
    tile_of,
    visit,
    visits_of,
    weights_of,
)

LEAST_SCORE = tl.constexpr(-5000.0)  # MASKED_SCORE; a key further below the maximum is hidden


@triton.jit
def entries_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    norms,
    firsts,
    answers,
    count,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    UPCAST: tl.constexpr,  # noqa: ARG001 - every kernel is launched with it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute some weights of one tile of packed rows, (batch, num_heads, q_len, count).

    ``firsts`` are their keys, int32, (count,); with DIAGONAL those of query 0, and each query reads
    as many keys further on.
    """
    _tile, batch, kv_head, q_idx, head, here = packed_rows(shape, GROUP, BLOCK_M)
    kv_end = kv_end_of(limits, batch, kv_head * GROUP, shape)
    at = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len + q_idx
    top, above = norms_of(norms, at, here)
    for start in range(0, count, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        first = tl.load(firsts + entry, mask=entry < count, other=-FAR)
        kv_idx = first[None, :] + tl.zeros((BLOCK_M, 1), tl.int32)
        if DIAGONAL:
            kv_idx += q_idx[:, None]
        there = (kv_idx >= 0) & (kv_idx < kv_end) & here[:, None]
        kv_idx = tl.where(there, kv_idx, 0)
        x = products_at(query, key, batch, head, kv_head, q_idx, kv_idx, here, there, HEAD_DIM)
        x = stepped(x, q_idx[:, None], kv_idx, batch, head[:, None], shape, steps, bias)
        there = entries_seen(
            q_idx, kv_idx, here, there, kv_end, batch, head, kv_head * GROUP, shape, limits, packed
        )
        weights = weights_of(x, top[:, None], above[:, None], steps)
        # A score of -inf makes 0, also in a row of NaN.
        weights = tl.where(there & (x != float("-inf")), weights, 0.0)
        into = answers + at[:, None] * count + entry[None, :]
        tl.store(into, weights, mask=here[:, None] & (entry < count)[None, :])


@triton.jit
def visible_keys_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    visits,
    norms,
    counts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Count the visible keys of one tile of queries, int32, (batch, num_heads, q_len)."""
    tiles = tl.cdiv(shape.q_len, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // shape.num_heads
    head = tl.program_id(0) // tiles % shape.num_heads
    q_idx = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    here = q_idx < shape.q_len
    q = tile_of(query, batch, head, tile * BLOCK_M, shape.q_len, HEAD_DIM, BLOCK_M)
    kv_end = kv_end_of(limits, batch, head, shape)
    start, stop, every_start, every_stop, of_query = rows_seen(
        tile * BLOCK_M, q_idx, here, kv_end, batch, head, shape, limits, packed
    )
    row = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len + q_idx
    top, _above = norms_of(norms, row, here)
    total = tl.zeros((BLOCK_M,), tl.int32)
    visits_at, begin, end = visits_of(visits, batch, head, tile, start, stop, BLOCK_N)
    for step in range(begin, end):
        first, edge = visit(visits, visits_at, step, every_start, every_stop, BLOCK_N)
        _keys, x = tile_by_rows(
            q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias, limits,
            packed, GROUP, HEAD_DIM, BLOCK_N, UPCAST,
        )  # fmt: skip
        visible = (x - top[:, None]) * steps.to_bits > LEAST_SCORE * LOG2E
        total += tl.sum(visible.to(tl.int32), 1)
    tl.store(counts + row, total, mask=here)
