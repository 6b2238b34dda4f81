"""The k largest weights of each row: the second of two passes, over the best groups of keys alone.

The first pass, ``rows_kernel``, lists for each row the k tiles with the largest maxima, and the
maxima of the groups of GROUPED neighbouring keys in these tiles. The k largest scores lie in the k
groups with the largest maxima: where one lay outside, each of the k maxima would come before it.
The same holds for the groups and their tiles. Equal maxima are ordered by group as equal scores are
by key, so ties go to the lowest index. This pass computes the scores of the k best groups again.

A row reads k GROUPED keys, mostly from L2, and takes 2 k GROUPED d operations on its threads: rows
list different keys, which a matrix unit could not share. Each of k rounds takes five operations for
each score. Floor: the bytes from L2, 2 GROUPED k d for each row in 16 bits.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from regard.backends.triton.row_kernels import GROUPED
from regard.backends.triton.tile import (
    FAR,
    entries_seen,
    kv_end_of,
    norms_of,
    packed_rows,
    products_at,
    stepped,
    weights_of,
)


@triton.jit
def _best_groups(
    tiles, maxima, at, here, k, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the k groups with the largest maxima for each key of a list, (BLOCK_M, K GROUPED)."""
    listed = tl.arange(0, K * GROUPS)[None, :]
    tile = tl.load(tiles + at[:, None] * K + listed // GROUPS, mask=here[:, None], other=-1)
    exists = here[:, None] & (tile >= 0)
    into = at[:, None] * (K * GROUPS) + listed
    best_of = tl.load(maxima + into, mask=exists, other=float("-inf"))
    number = tile * GROUPS + listed % GROUPS
    slot = tl.arange(0, K * GROUPED)[None, :] // GROUPED
    groups = -1 + 0 * slot + tl.zeros((BLOCK_M, 1), tl.int32)
    for rank in range(k):
        best = tl.max(best_of, 1)
        group = tl.min(tl.where(best_of == best[:, None], number, FAR), 1)
        best_of = tl.where(number == group[:, None], float("-inf"), best_of)
        taken = (best > float("-inf"))[:, None] & (slot == rank)
        groups = tl.where(taken, group[:, None], groups)
    return groups


@triton.jit
def top_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    norms,
    tiles,
    maxima,
    values,
    indices,
    k,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    UPCAST: tl.constexpr,  # noqa: ARG001 - every kernel is launched with it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # noqa: ARG001 - likewise
):
    """Compute one tile of packed rows, of K listed tiles with GROUPS groups each."""
    _tile, batch, kv_head, q_idx, head, here = packed_rows(shape, GROUP, BLOCK_M)
    kv_end = kv_end_of(limits, batch, kv_head * GROUP, shape)
    at = (batch * shape.num_heads + head).to(tl.int64) * shape.q_len + q_idx
    top, above = norms_of(norms, at, here)
    if maxima is None:
        group = tl.load(tiles + at, mask=here, other=-1)[:, None] + tl.zeros((1, GROUPED), tl.int32)
    else:
        group = _best_groups(tiles, maxima, at, here, k, K, GROUPS, BLOCK_M)
    kv_idx = group * GROUPED + tl.arange(0, K * GROUPED)[None, :] % GROUPED
    kv_idx = tl.where(group < 0, 0, kv_idx)
    there = (group >= 0) & (kv_idx < kv_end)
    x = products_at(query, key, batch, head, kv_head, q_idx, kv_idx, here, there, HEAD_DIM)
    x = stepped(x, q_idx[:, None], kv_idx, batch, head[:, None], shape, steps, bias)
    seen = entries_seen(
        q_idx, kv_idx, here, there, kv_end, batch, head, kv_head * GROUP, shape, limits, packed
    )
    x = tl.where(seen, x, float("-inf"))
    for rank in range(k):
        best = tl.max(x, 1)
        place = tl.min(tl.where(x == best[:, None], kv_idx, FAR), 1)
        x = tl.where(kv_idx == place[:, None], float("-inf"), x)
        weights = weights_of(best, top, above, steps)
        found = (best > float("-inf")) & (above == above)
        nothing = tl.where(above == above, 0.0, above)  # NaN in a row with NaN or inf
        tl.store(values + at * k + rank, tl.where(found, weights, nothing), mask=here)
        tl.store(indices + at * k + rank, tl.where(found, place, -1).to(tl.int64), mask=here)
