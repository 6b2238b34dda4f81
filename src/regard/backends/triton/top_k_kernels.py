"""The k largest weights of each row: the second of two passes, over the best tiles alone.

The first pass, ``rows_kernel``, lists for each row the k tiles with the largest maxima. The k
largest scores lie in those tiles: where one lay outside, each of the k maxima would come before it.
Equal maxima are ordered by tile as equal scores are by key, so ties go to the lowest index. This
pass computes the listed tiles again and moves what is larger than the least of a row's list into
it, one score of each row at a time. The list starts with the least of the k maxima, a little
lowered, so that few scores are moved that later ones push out. A pass that computes scores more
than that below the first pass would miss some: it starts again, without that bound.

A tile that some row lists costs 2 m n d FLOPs, n d numbers read, and about eight operations for
each score and each round; there is one round more than the most scores that a row takes from it.
No exps but k for a row. Floor: another 0.5 of a forward where all tiles are listed by some row; in
real attention neighbouring rows list the same few.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from regard.backends.triton.row_kernels import listed
from regard.backends.triton.tile import (
    FAR,
    allowed,
    document,
    kv_end_of,
    norms_of,
    packed_rows,
    product_by_parts,
    rows_of,
    scores,
    stepped,
    tile_of,
    weights_of,
)

__all__ = ["top_kernel"]

LOWERED = tl.constexpr(2.0**-12)  # as a part of the score
SMALL = tl.constexpr(2.0**-64)  # where that is 0


@triton.jit
def _moved(x, kv_idx, best_scores, best_keys):
    """Move the scores of a tile that are larger than the least of a row's list into it."""
    best = tl.max(x, 1)
    while tl.max((best > tl.min(best_scores, 1)).to(tl.int32), 0) > 0:
        place = tl.min(tl.where(x == best[:, None], kv_idx[None, :], FAR), 1)
        best_scores, best_keys = listed(best, place[:, None], best_scores, best_keys)
        x = tl.where(kv_idx[None, :] == place[:, None], float("-inf"), x)
        best = tl.max(x, 1)
    return best_scores, best_keys


@triton.jit
def top_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    keep,
    norms,
    tiles,
    least,
    values,
    indices,
    k,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one tile of packed rows, with the tiles and the BLOCK_N of the first pass."""
    _tile, batch, kv_head, q_idx, head, here = packed_rows(shape, GROUP, BLOCK_M)
    BY_PARTS: tl.constexpr = query.pointer.dtype.element_ty == tl.float32
    if not BY_PARTS:
        q = rows_of(query, batch, head, q_idx, here, HEAD_DIM)
    kv_end = kv_end_of(limits, batch, kv_head * GROUP, shape)
    of_query = q_idx
    if limits.first is not None:
        of_query, _stop = document(limits, batch, kv_head * GROUP, q_idx + limits.shift, here)
    at = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len + q_idx
    top, above = norms_of(norms, at, here)
    slots = tl.arange(0, K)[None, :] + tl.zeros((BLOCK_M, 1), tl.int32)
    candidates = tl.load(tiles + at[:, None] * K + slots, mask=here[:, None], other=-1)
    first_tile = tl.min(tl.min(tl.where(candidates < 0, FAR, candidates), 1), 0)
    last_tile = tl.max(tl.max(candidates, 1), 0)
    bound = tl.load(least + at, mask=here, other=float("-inf"))
    bound -= tl.abs(bound) * LOWERED + SMALL
    # A row with NaN or inf has no answer to wait for.
    bound = tl.where((bound > float("-inf")) & (above == above), bound, float("-inf"))
    best_scores = tl.zeros((BLOCK_M, K), tl.float32)
    best_keys = slots
    missing = 1
    while missing > 0:
        best_scores = tl.where(slots < k, bound[:, None], float("inf"))
        best_keys = -1 - slots
        for number in range(first_tile, last_tile + 1):
            lists = tl.max((candidates == number).to(tl.int32), 1)
            if tl.max(lists, 0) > 0:
                kv_idx = number * BLOCK_N + tl.arange(0, BLOCK_N)
                if BY_PARTS:
                    x = product_by_parts(
                        query, key, batch, head, kv_head, q_idx, kv_idx, shape, HEAD_DIM
                    )
                    x = stepped(
                        x, q_idx[:, None], kv_idx[None, :], batch, head[:, None], shape, steps, bias
                    )
                else:
                    keys = tile_of(
                        key, batch, kv_head, number * BLOCK_N, shape.kv_len, HEAD_DIM, BLOCK_N
                    )
                    x = scores(
                        q, keys.T, q_idx[:, None], kv_idx[None, :], batch, head[:, None], shape,
                        steps, bias, UPCAST,
                    )  # fmt: skip
                of_key = kv_idx
                if limits.first is not None:
                    of_key, _ = document(limits, batch, kv_head * GROUP, kv_idx, kv_idx < kv_end)
                seen = allowed(
                    q_idx[:, None], kv_idx[None, :], of_query[:, None], of_key[None, :], kv_end,
                    batch, head[:, None], shape, limits, keep,
                )  # fmt: skip
                x = tl.where(seen & (lists > 0)[:, None], x, float("-inf"))
                best_scores, best_keys = _moved(x, kv_idx, best_scores, best_keys)
        lacking = (best_keys < 0) & (slots < k) & (bound > float("-inf"))[:, None]
        missing = tl.max(tl.max(lacking.to(tl.int32), 1), 0)
        bound = tl.full((BLOCK_M,), float("-inf"), tl.float32)

    best_scores = tl.where(slots < k, best_scores, float("-inf"))
    ranks = tl.zeros((BLOCK_M, K), tl.int32)
    for other in range(K):
        score = tl.sum(tl.where(slots == other, best_scores, 0.0), 1)[:, None]
        its_key = tl.sum(tl.where(slots == other, best_keys, 0), 1)[:, None]
        before = (score == best_scores) & (its_key < best_keys)
        ranks += ((score > best_scores) | before).to(tl.int32)
    weights = weights_of(best_scores, top[:, None], above[:, None], steps)
    found = (best_keys >= 0) & (above == above)[:, None]
    into = at[:, None] * k + ranks
    stored = here[:, None] & (ranks < k)
    nothing = tl.where(above == above, 0.0, above)[:, None]  # NaN in a row with NaN or inf
    tl.store(values + into, tl.where(found, weights, nothing), mask=stored)
    tl.store(indices + into, tl.where(found, best_keys, -1).to(tl.int64), mask=stored)
