"""Column sums, tiles of them and transposed products, given the norms of the rows.

A program has a tile of keys of one query head and reads the queries and their norms tile by tile.
A weight is one exp2. Each key is summed by one program, in order and without atomics.

A tile of n keys x m queries costs 2 m n d FLOPs, m n exps, m (d + 2) numbers read and three
operations for each score. Floor: 0.5 of a forward for d = 128, 1 for d = 64. A transposed product,
weights transposed @ operand, adds 2 m n w FLOPs and m w numbers read, w its width, and rounds the
weights to the dtype of the operand, as a forward does: the floor is that of a forward.

Tiles are the column sums over a part of the rows, one part after another, so that the cells of a
pooled map and the mass between spans of text come from the pass that column sums need.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.tile import (
    columns_seen,
    kv_end_of,
    norms_of,
    tile_by_keys,
    tile_of,
    visit,
    visits_of,
    weights_of,
)


class Parts(NamedTuple):
    """The queries, cut into parts that follow each other; a tile meets two at most.

    Attributes:
        at: int32, (q_len,): the part that a query lies in; None: TILES tiles make a part.
        stops: int32, (parts,): one past the last query of a part.
    """

    at: Any
    stops: Any


@triton.jit
def _store(held, sums, kv_first, shape, BLOCK_N: tl.constexpr, KEYS: tl.constexpr):
    """Store the sums of each tile of one part."""
    place = kv_first // KEYS + tl.arange(0, BLOCK_N // KEYS)
    mass = tl.sum(tl.reshape(held, (BLOCK_N // KEYS, KEYS)), 1)
    tl.store(sums + place, mass, mask=place < tl.cdiv(shape.kv_len, KEYS))


# The number of parts differs from text to text, so it takes no kernels of its own.
@triton.jit(do_not_specialize=["count"])
def columns_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    visits,
    norms,
    parts,
    count,
    sums,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute one tile of keys of one head; the longest columns of a causal matrix come first.

    sums are zeros of (batch, num_heads, parts, kv_len / KEYS): of each part of the rows the
    mass on KEYS keys.
    """
    tiles = tl.cdiv(shape.kv_len, BLOCK_N)
    tile = tl.program_id(0) % tiles
    kv_first = tile * BLOCK_N
    batch = tl.program_id(0) // tiles // shape.num_heads
    head = tl.program_id(0) // tiles % shape.num_heads
    kv_idx = kv_first + tl.arange(0, BLOCK_N)
    keys = tile_of(key, batch, head // GROUP, kv_first, shape.kv_len, HEAD_DIM, BLOCK_N)
    kv_end = kv_end_of(limits, batch, head, shape)
    start, stop, every_start, every_stop, of_key = columns_seen(
        kv_first, kv_idx, kv_end, batch, head, shape, limits, packed
    )
    held = tl.zeros((BLOCK_N,), tl.float32)
    at = (batch * shape.num_heads + head).to(tl.int64)
    row = at * shape.q_len
    width = tl.cdiv(shape.kv_len, KEYS)
    sums += at * count * width
    part = -1 + 0 * start
    visits_at, begin, end = visits_of(visits, batch, head, tile, start, stop, BLOCK_M)
    for step in range(begin, end):
        first, edge = visit(visits, visits_at, step, every_start, every_stop, BLOCK_M)
        q_idx = first + tl.arange(0, BLOCK_M)
        here = q_idx < shape.q_len
        top, above = norms_of(norms, row + q_idx, here)
        _q, x = tile_by_keys(
            query, keys, kv_idx, of_key, edge, kv_end, batch, head, first, kv_first, shape, steps,
            bias, limits, packed, HEAD_DIM, BLOCK_M, BLOCK_N, UPCAST,
        )  # fmt: skip
        weights = weights_of(x, top[None, :], above[None, :], steps)
        # In a row of NaN not even a score of -inf makes 0.
        if edge | (bias.pointer is not None):
            weights = tl.where(x == float("-inf"), 0.0, weights)
        its_part = first // (BLOCK_M * TILES)
        if parts.at is not None:
            its_part = tl.load(parts.at + first)
        if its_part != part:
            if part >= 0:
                _store(held, sums + part * width, kv_first, shape, BLOCK_N, KEYS)
            held = tl.zeros((BLOCK_N,), tl.float32)
            part = its_part
        if SPLITS:
            boundary = tl.load(parts.stops + part)
            if boundary < tl.minimum(first + BLOCK_M, shape.q_len):
                before = q_idx[None, :] < boundary
                held += tl.sum(tl.where(before, weights, 0.0), 1)
                _store(held, sums + part * width, kv_first, shape, BLOCK_N, KEYS)
                held = tl.zeros((BLOCK_N,), tl.float32)
                weights = tl.where(before, 0.0, weights)
                part += 1
        held += tl.sum(weights, 1)
    if part >= 0:
        _store(held, sums + part * width, kv_first, shape, BLOCK_N, KEYS)


@triton.jit
def products_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    visits,
    norms,
    operand,
    products,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute one tile of keys of one head; the longest columns of a causal matrix come first.

    products is (batch, num_heads, kv_len, WIDTH).
    """
    tiles = tl.cdiv(shape.kv_len, BLOCK_N)
    kv_first = tl.program_id(0) % tiles * BLOCK_N
    batch = tl.program_id(0) // tiles // shape.num_heads
    head = tl.program_id(0) // tiles % shape.num_heads
    kv_idx = kv_first + tl.arange(0, BLOCK_N)
    keys = tile_of(key, batch, head // GROUP, kv_first, shape.kv_len, HEAD_DIM, BLOCK_N)
    kv_end = kv_end_of(limits, batch, head, shape)
    start, stop, every_start, every_stop, of_key = columns_seen(
        kv_first, kv_idx, kv_end, batch, head, shape, limits, packed
    )
    WIDE: tl.constexpr = max(16, triton.next_power_of_2(WIDTH))
    product = tl.zeros((BLOCK_N, WIDE), tl.float32)
    row = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len
    program = kv_first // BLOCK_N
    visits_at, begin, end = visits_of(visits, batch, head, program, start, stop, BLOCK_M)
    for step in range(begin, end):
        first, edge = visit(visits, visits_at, step, every_start, every_stop, BLOCK_M)
        q_idx = first + tl.arange(0, BLOCK_M)
        here = q_idx < shape.q_len
        _q, x = tile_by_keys(
            query, keys, kv_idx, of_key, edge, kv_end, batch, head, first, kv_first, shape, steps,
            bias, limits, packed, HEAD_DIM, BLOCK_M, BLOCK_N, UPCAST,
        )  # fmt: skip
        top, above = norms_of(norms, row + q_idx, here)
        weights = weights_of(x, top[None, :], above[None, :], steps)
        # In a row of NaN not even a score of -inf makes 0.
        if edge | (bias.pointer is not None):
            weights = tl.where(x == float("-inf"), 0.0, weights)
        values = tile_of(operand, batch, head // OPERAND_GROUP, first, shape.q_len, WIDTH, BLOCK_M)
        weights = weights.to(values.dtype)
        if UPCAST:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        product = tl.dot(weights, values, product, input_precision="ieee")
    there = kv_idx < shape.kv_len
    at = (batch * shape.num_heads + head).to(tl.int64) * shape.kv_len + kv_idx
    d = tl.arange(0, WIDE)
    into = products + at[:, None] * WIDTH + d[None, :]
    tl.store(into, product, mask=there[:, None] & (d < WIDTH)[None, :])
