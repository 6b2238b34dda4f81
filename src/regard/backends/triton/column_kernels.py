"""Column sums and transposed products, given the norms of the rows.

A program has a tile of keys of one query head and reads the queries and their norms tile by tile.
A weight is one exp2. The keys are the rows of its tile, so that most of a sum stays in one thread.
Each key is summed by one program, in order and without atomics.

A tile of n keys x m queries costs 2 m n d FLOPs, m n exps, m (d + 2) numbers read and three
operations for each score. Floor: 0.5 of a forward for d = 128, 1 for d = 64. A transposed product,
weights transposed @ operand, adds 2 m n w FLOPs and m w numbers read, w its width, and rounds the
weights to the dtype of the operand, as a forward does: the floor is that of a forward.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false

import triton
import triton.language as tl

from regard.backends.triton.tile import (
    FAR,
    allowed,
    document,
    kv_end_of,
    norms_of,
    queries_seen,
    scores,
    tile_of,
    weights_of,
)

__all__ = ["columns_kernel"]


@triton.jit
def columns_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    keep,
    norms,
    sums,
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

    sums is (batch, num_heads, kv_len), products (batch, num_heads, kv_len, WIDTH); None: not asked.
    """
    tiles = tl.cdiv(shape.kv_len, BLOCK_N)
    kv_first = tl.program_id(0) % tiles * BLOCK_N
    batch = tl.program_id(0) // tiles // shape.num_heads
    head = tl.program_id(0) // tiles % shape.num_heads
    kv_idx = kv_first + tl.arange(0, BLOCK_N)
    keys = tile_of(key, batch, head // GROUP, kv_first, shape.kv_len, HEAD_DIM, BLOCK_N)
    kv_end = kv_end_of(limits, batch, head, shape)
    start, stop, every_start, every_stop = queries_seen(
        kv_first, kv_first + BLOCK_N - 1, kv_end, shape, limits, keep
    )
    of_key = kv_idx
    if limits.first is not None:
        of_key, its_stop = document(limits, batch, head, kv_idx, kv_idx < kv_end)
        earliest = tl.min(tl.where(of_key < 0, FAR, of_key), 0)
        start = tl.maximum(start, earliest - limits.shift)
        stop = tl.minimum(stop, tl.max(its_stop, 0) - limits.shift)
    # float32 would drift: a long text has a thousand tiles of queries.
    total = tl.zeros((BLOCK_N,), tl.float64)
    if products is not None:
        WIDE: tl.constexpr = max(16, triton.next_power_of_2(WIDTH))
        product = tl.zeros((BLOCK_N, WIDE), tl.float32)
    row = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len
    for first in range(start // BLOCK_M * BLOCK_M, stop, BLOCK_M):
        q_idx = first + tl.arange(0, BLOCK_M)
        here = q_idx < shape.q_len
        q = tile_of(query, batch, head, first, shape.q_len, HEAD_DIM, BLOCK_M)
        x = scores(
            keys, q.T, q_idx[None, :], kv_idx[:, None], batch, head, shape, steps, bias, UPCAST
        )
        edge = (first < every_start) | (first + BLOCK_M > every_stop)
        if edge:
            of_query = q_idx
            if limits.first is not None:
                of_query, _ = document(limits, batch, head, q_idx + limits.shift, here)
            seen = allowed(
                q_idx[None, :], kv_idx[:, None], of_query[None, :], of_key[:, None], kv_end, batch,
                head, shape, limits, keep,
            )  # fmt: skip
            x = tl.where(seen & here[None, :], x, float("-inf"))
        top, above = norms_of(norms, row + q_idx, here)
        weights = weights_of(x, top[None, :], above[None, :], steps)
        # In a row of NaN not even a score of -inf makes 0.
        if edge | (bias.pointer is not None):
            weights = tl.where(x == float("-inf"), 0.0, weights)
        if sums is not None:
            total += tl.sum(weights, 1)
        if products is not None:
            values = tile_of(
                operand, batch, head // OPERAND_GROUP, first, shape.q_len, WIDTH, BLOCK_M
            )
            weights = weights.to(values.dtype)
            if UPCAST:
                weights, values = weights.to(tl.float32), values.to(tl.float32)
            product = tl.dot(weights, values, product, input_precision="ieee")
    there = kv_idx < shape.kv_len
    at = (batch * shape.num_heads + head).to(tl.int64) * shape.kv_len + kv_idx
    if sums is not None:
        tl.store(sums + at, total, mask=there)
    if products is not None:
        d = tl.arange(0, WIDE)
        into = products + at[:, None] * WIDTH + d[None, :]
        tl.store(into, product, mask=there[:, None] & (d < WIDTH)[None, :])
