"""Divergences between the rows of two matrices, and what their gradients need of the other matrix.

A program owns a tile of rows of one head and computes the scores of both matrices, tile after tile
of keys. Let p and q be the weights of a key, l and k their logarithms, and x = k - l. Divergences
are sums of terms that are never negative, so that a small divergence does not cancel:

    q - p - p x                    Kullback-Leibler
    p log(p/m) + q log(q/m)        twice Jensen-Shannon, with m = (p + q) / 2

For a small x both are power series. ``reductions/divergences.py`` has the rest of the formulas.

A tile of m queries x n keys costs 4 m n d FLOPs, 2 m n exps or 3, and about 20 operations for each
score. Floor: 1 forward for d = 128, 2 for d = 64, beside the norms of both matrices.

For a loss with the derivative g by the divergence, G = dLoss/dW and dS of ``gradient_kernels`` are

    G = g (l - k + 1)              Kullback-Leibler, in the first matrix
    dS = q (g sum(p)) - g p        Kullback-Leibler, in the second matrix
    G = g log(p/m)                 twice Jensen-Shannon; q for p in the second matrix
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from regard.backends.triton.tile import (
    LEAST,
    LN2,
    kv_end_of,
    norms_of,
    rows_seen,
    tile_by_rows,
    tile_of,
)

LOWEST = tl.constexpr(-1e30)  # times a weight of 0 it is 0
NEAR = tl.constexpr(0.25)  # of x: there 5 terms of exp(x) - 1 - x are exact in float32
FAR = tl.constexpr(300.0)  # in bits; times a weight of 2^-300 it is 0


@triton.jit
def _crossed(p, q, x):
    """Return q - p - p x."""
    series = 1 + x * (1 / 3) * (1 + x * (1 / 4) * (1 + x * (1 / 5) * (1 + x * (1 / 6))))
    of_near = p * (0.5 * x * x * series)
    return tl.where(tl.abs(x) < NEAR, of_near, q - p - p * x)


@triton.jit
def _of_mean(x, larger, ratio):
    """Return p log(p/m) + q log(q/m), from the larger of both and the ratio of the smaller."""
    slope = (1 - ratio) / (1 + ratio)  # tanh(x / 2)
    square = slope * slope
    series = 1 / 15 + square * (1 / 28 + square * (1 / 45 + square * (1 / 66 + square * (1 / 91))))
    of_near = 0.5 * (1 + ratio) * square * (1 + square * (1 / 6 + square * series))
    of_far = (1 + ratio) * (LN2 - tl.log2(1 + ratio) * LN2) - tl.abs(x) * ratio
    return larger * tl.where(tl.abs(x) < 1, of_near, of_far)


@triton.jit
def _share_of_mean(apart, ratio):
    """Return log(p/m), from log(q/p) in bits and the ratio of the smaller of both."""
    return LN2 * (1 - tl.maximum(apart, 0.0) - tl.log2(1 + ratio))


@triton.jit
def divergence_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    norms,
    other_query,
    other_key,
    other_steps,
    other_bias,
    other_limits,
    other_packed,
    other_norms,
    totals,
    of_first,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OTHER_GROUP: tl.constexpr,
    OTHER_DIM: tl.constexpr,
    KIND: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the sum of the terms of each row of one tile, (batch, num_heads, q_len).

    Where the terms have q - p - p x, it is inf if the other matrix masks a key of this one.
    ``of_first`` is the sum of p log(p/m), of the same shape; None: not asked.
    """
    tiles = tl.cdiv(shape.q_len, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // shape.num_heads
    head = tl.program_id(0) // tiles % shape.num_heads
    q_first = tile * BLOCK_M
    q_idx = q_first + tl.arange(0, BLOCK_M)
    here = q_idx < shape.q_len
    row = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len + q_idx
    q = tile_of(query, batch, head, q_first, shape.q_len, HEAD_DIM, BLOCK_M)
    kv_end = kv_end_of(limits, batch, head, shape)
    start, stop, every_start, every_stop, of_query = rows_seen(
        q_first, q_idx, here, kv_end, batch, head, shape, limits, packed
    )
    top, above = norms_of(norms, row, here)
    other_q = tile_of(other_query, batch, head, q_first, shape.q_len, OTHER_DIM, BLOCK_M)
    other_end = kv_end_of(other_limits, batch, head, shape)
    other_start, other_stop, other_every_start, other_every_stop, other_of_query = rows_seen(
        q_first, q_idx, here, other_end, batch, head, shape, other_limits, other_packed
    )
    other_top, other_above = norms_of(other_norms, row, here)
    # The range of a matrix whose rows see nothing may lie anywhere.
    none, other_none = start >= stop, other_start >= other_stop
    begin = tl.where(none, other_start, tl.where(other_none, start, tl.minimum(start, other_start)))
    end = tl.where(none, other_stop, tl.where(other_none, stop, tl.maximum(stop, other_stop)))
    total = tl.zeros((BLOCK_M,), tl.float32)
    first_total = tl.zeros((BLOCK_M,), tl.float32)
    apart = tl.zeros((BLOCK_M,), tl.int32)
    for step in range(begin // BLOCK_N, tl.cdiv(end, BLOCK_N)):
        first = step * BLOCK_N
        edge = (first < every_start) | (first + BLOCK_N > every_stop)
        _keys, x = tile_by_rows(
            q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias, limits,
            packed, GROUP, HEAD_DIM, BLOCK_N, UPCAST,
        )  # fmt: skip
        other_edge = (first < other_every_start) | (first + BLOCK_N > other_every_stop)
        _other_keys, y = tile_by_rows(
            other_q, other_key, q_idx, other_of_query, other_edge, other_end, batch, head, first,
            shape, other_steps, other_bias, other_limits, other_packed, OTHER_GROUP, OTHER_DIM,
            BLOCK_N, UPCAST,
        )  # fmt: skip
        bits = (x - top[:, None]) * steps.to_bits - above[:, None]
        other_bits = (y - other_top[:, None]) * other_steps.to_bits - other_above[:, None]
        masked = edge | other_edge | (bias.pointer is not None) | (other_bias.pointer is not None)
        if masked:
            hidden, other_hidden = x == float("-inf"), y == float("-inf")
            # In a row of NaN not even a score of -inf makes -inf.
            bits = tl.where(hidden, LOWEST, bits)
            other_bits = tl.where(other_hidden, LOWEST, other_bits)
            if KIND != "jensen_shannon":
                alone = other_hidden & (x != float("-inf"))
                apart = tl.maximum(apart, tl.max(alone.to(tl.int32), 1))
        log_ratio = other_bits - bits
        if KIND == "jensen_shannon":
            larger = tl.exp2(tl.maximum(bits, other_bits))
            ratio = tl.exp2(-tl.abs(log_ratio))
            total += tl.sum(_of_mean(tl.maximum(log_ratio, -FAR) * LN2, larger, ratio), 1)
            if of_first is not None:
                p = larger * tl.where(log_ratio > 0, ratio, 1.0)
                share = _share_of_mean(tl.minimum(log_ratio, FAR), ratio)
                first_total += tl.sum(p * share, 1)
        else:
            p, w = tl.exp2(bits), tl.exp2(other_bits)
            total += tl.sum(_crossed(p, w, log_ratio * LN2), 1)
    if KIND != "jensen_shannon":
        defined = (above == above) & (other_above == other_above)
        total = tl.where((apart > 0) & defined, float("inf"), total)
    tl.store(totals + row, total, mask=here)
    if of_first is not None:
        tl.store(of_first + row, first_total, mask=here)


@triton.jit
def with_other(by_weight, bits, y, top, above, numbers, steps, KIND: tl.constexpr):
    """Add the term of a divergence to the derivative by the weights.

    Args:
        by_weight: the derivative so far, of one tile.
        bits: the logarithms of the weights.
        y: the scores of the other matrix.
        top: the norms of its rows.
        above: likewise.
        numbers: the derivative by the divergence, for each row.
        steps: of the other matrix.
        KIND: of the term: the divergence whose first matrix this is, ``"second"`` for the second
            matrix of a Kullback-Leibler divergence; Jensen-Shannon is symmetric.

    Returns:
        The derivative by the weights, and what is subtracted from that by the scores.
    """
    other_bits = (y - top) * steps.to_bits - above
    taken = 0.0
    if KIND == "second":
        taken = numbers * tl.exp2(other_bits)
    else:
        other_bits = tl.maximum(other_bits, LOWEST)
        bits = tl.maximum(bits, LEAST)
        if KIND == "kullback_leibler":
            by_weight += numbers * ((bits - other_bits) * LN2)
        else:
            apart = other_bits - bits
            by_weight += numbers * _share_of_mean(apart, tl.exp2(-tl.abs(apart)))
    return by_weight, taken
