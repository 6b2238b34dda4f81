"""Statistics of each row in one online pass: logsumexp, mean score, largest score, best tiles.

A program owns a tile of rows: the queries of all heads that share a key head, packed, so that a key
is read once for the group and one query of a group of heads still fills a tile. It reads the keys
tile after tile.

A tile of m rows x n keys costs 2 m n d FLOPs, m n exps, n d numbers read, and for each score two
operations for the maximum and the sum; the mean score adds three, the index of the maximum three,
the list of best tiles none for a score and about 4 k for a row. Read from memory: the query once,
the key once for each tile of rows (from L2). Floor: 0.5 of a forward for d = 128, 1 for d = 64.

The expected score is counted from the running maximum, like the sum: where the maximum rises by r
bits, ``sum(p x)`` becomes ``2^-r (sum(p x) - r sum(p))``. Of it and the log of the sum the entropy
is a difference of small numbers.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.tile import (
    FAR,
    LEAST,
    LN2,
    LOG2E,
    Norms,
    document,
    documents_of,
    keys_seen,
    kv_end_of,
    packed_rows,
    rows_of,
    scores,
    seen_scores,
    tokens_of,
    visit,
    visits_of,
)

GROUPED = tl.constexpr(8)  # keys of a group
MOST = tl.constexpr(1e9)  # in bits; times 0 it is 0


class RowAnswers(NamedTuple):
    """The output tensors; None if not requested.

    Attributes:
        lse: natural logsumexp, float32, (batch, num_heads, q_len).
        norms: the row maximum and the log of the sum, of the same shape.
        maximum: the largest score, of the same shape.
        mass: the sum of the weights.
        mean_shifted: the sum of weights * (scores - maximum), in nats; or None.
        tiles: int32, the tiles of BLOCK_N keys with the k largest maxima, (batch, num_heads, q_len,
            K), in no order; negative where there are fewer. Of equal maxima the lower tiles stay.
            Without ``maxima`` the one group of GROUPED keys with the largest maximum.
        maxima: of each of these tiles those of its groups of GROUPED keys, (batch, num_heads,
            q_len, K, BLOCK_N / GROUPED).
    """

    lse: Any
    norms: Norms
    maximum: Any
    mass: Any
    mean_shifted: Any
    tiles: Any
    maxima: Any


@triton.jit
def _slot_for(best, values, tiles):
    """Return True at the place of each row's list that a tile takes: the last of the smallest."""
    least = tl.min(values, 1)
    last = tl.max(tl.where(values == least[:, None], tiles, -FAR), 1)
    return (best > least)[:, None] & (tiles == last[:, None])


@triton.jit
def rows_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    visits,
    sink,
    answers,
    k,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one tile of packed rows of one key head; the longest causal rows come first."""
    tile, batch, kv_head, q_idx, head, here = packed_rows(shape, GROUP, BLOCK_M)
    q = rows_of(query, batch, head, q_idx, here, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    kv_end = kv_end_of(limits, batch, kv_head * GROUP, shape)
    q_last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, shape.q_len - 1)
    start, stop, every_start, every_stop = keys_seen(
        tile * BLOCK_M // GROUP, q_last, kv_end, limits, packed
    )
    of_query = q_idx
    if limits.first is not None:
        position = q_idx + limits.shift
        of_query, its_stop = document(limits, batch, kv_head * GROUP, position, here)
        start = tl.maximum(start, tl.min(tl.where(of_query < 0, FAR, of_query), 0))
        stop = tl.minimum(stop, tl.max(its_stop, 0))
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    expected = tl.zeros((BLOCK_M,), tl.float32)
    # A thread has columns that lie eight apart: with this order each group is in one thread.
    column = tl.arange(0, BLOCK_N)
    if answers.tiles is not None:
        slots = tl.arange(0, K)[None, :] + tl.zeros((BLOCK_M, 1), tl.int32)
        values = tl.where(slots < k, float("-inf"), float("inf"))
        tiles = -1 - slots
        at = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len + q_idx
        PART: tl.constexpr = min(8 * GROUPED, BLOCK_N)
        EIGHTH: tl.constexpr = PART // GROUPED
        column = column // PART * PART + column % EIGHTH * GROUPED + column % PART // EIGHTH
    visits_at, begin, end = visits_of(visits, batch, kv_head, tile, start, stop, BLOCK_N)
    for step in range(begin, end):
        first, edge = visit(visits, visits_at, step, every_start, every_stop, BLOCK_N)
        kv_idx = first + column
        keys = tokens_of(key, batch, kv_head, first, column, shape.kv_len, HEAD_DIM)
        x = scores(
            q, keys.T, q_idx[:, None], kv_idx[None, :], batch, head[:, None], shape, steps, bias,
            UPCAST,
        )  # fmt: skip
        of_key = documents_of(limits, batch, kv_head * GROUP, kv_idx, kv_idx < kv_end)
        x = seen_scores(
            x, edge, q_idx[:, None], kv_idx[None, :], of_query[:, None], of_key[None, :],
            None, kv_end, batch, head[:, None], shape, limits, packed, first, BLOCK_N,
        )  # fmt: skip
        if answers.tiles is not None:
            maxima = tl.max(tl.reshape(x, (BLOCK_M, BLOCK_N // PART, GROUPED, EIGHTH)), 2)
            maxima = tl.reshape(maxima, (BLOCK_M, BLOCK_N // GROUPED))
            best = tl.max(maxima, 1)
            numbers = first // GROUPED + tl.arange(0, BLOCK_N // GROUPED)[None, :]
        if answers.tiles is not None and answers.maxima is None:
            group = tl.min(tl.where(maxima == best[:, None], numbers, FAR), 1)
            tiles = tl.where((best > top)[:, None], group[:, None], tiles)
        elif answers.tiles is not None:
            slot = _slot_for(best, values, tiles)
            values = tl.where(slot, best[:, None], values)
            tiles = tl.where(slot, first // BLOCK_N, tiles)
            # The maxima of a tile that later leaves the list are written over.
            place = tl.max(tl.where(slot, slots, -1), 1)
            into = answers.maxima + (at * K + place)[:, None] * (BLOCK_N // GROUPED)
            into += tl.arange(0, BLOCK_N // GROUPED)[None, :]
            tl.store(into, maxima, mask=(here & (place >= 0))[:, None])
        else:
            best = tl.max(x, 1)
        higher = tl.maximum(top, best)
        # An infinite score stays infinite, and so do the sum and the logsumexp.
        from_here = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
        # Times a sum of 0 they make 0, also where they were -inf.
        fall = tl.maximum((top - from_here) * steps.to_bits, LEAST)
        # Scaled first, a fused multiply-add would take a rounded product from an exact one.
        below = (x - from_here[:, None]) * steps.to_bits
        powers = tl.exp2(below)
        if answers.mean_shifted is not None:
            product = tl.sum(powers * tl.maximum(below, LEAST), 1)
            expected = tl.exp2(fall) * (expected + fall * total) + product
        total = total * tl.exp2(fall) + tl.sum(powers, 1)
        top = higher

    empty = total == 0
    reference = tl.where(empty, 0.0, top * (steps.to_bits * LN2))
    above = tl.log2(tl.where(empty, 1.0, total))
    lse = reference + above * LN2
    share = tl.where(empty, 0.0, 1.0)
    if sink is not None:
        logit = tl.load(sink + batch * shape.num_heads + head)
        bits = (logit - reference) * LOG2E
        # Beside a row at the lowest number a finite sink is not infinitely far above.
        bits = tl.where(logit < float("inf"), tl.minimum(bits, MOST), bits)
        rise = tl.maximum(bits, 0.0)
        of_sink = tl.where(bits > 0, 1.0, tl.exp2(bits))
        both = tl.log2(total * tl.exp2(-rise) + of_sink)
        lse = tl.maximum(reference, logit) + both * LN2
        share = tl.where(empty, 0.0, tl.exp2(above - rise - both))
        above = tl.where(empty, 0.0, rise + both)
    # A score of NaN or inf makes every weight of its row NaN.
    above = tl.where(empty | (lse < float("inf")), above, float("nan"))
    share = tl.where(above == above, share, above)
    at = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len + q_idx
    tl.store(answers.lse + at, tl.where(empty, float("-inf"), lse), mask=here)
    tl.store(answers.norms.top + at, top, mask=here)
    tl.store(answers.norms.above + at, above, mask=here)
    largest = tl.where(empty, float("-inf"), top * (steps.to_bits * LN2))
    tl.store(answers.maximum + at, tl.where(total == total, largest, float("nan")), mask=here)
    tl.store(answers.mass + at, share, mask=here)
    if answers.mean_shifted is not None:
        shifted = tl.where(empty, 0.0, expected * tl.exp2(-above) * LN2)
        tl.store(answers.mean_shifted + at, shifted, mask=here)
    if answers.tiles is not None:
        into = answers.tiles + at[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(into, tiles, mask=here[:, None])
