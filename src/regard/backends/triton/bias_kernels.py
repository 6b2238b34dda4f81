"""The gradient of a bias: sums of tiles of the derivative by the scores.

An element of a bias is added to one score, or to all scores of some batch entries, heads, rows or
columns, or, as a position bias, to the scores of one diagonal. Its gradient is the sum of their
derivatives. A program has a tile of the bias, or a diagonal of square tiles, computes the tiles of
the derivative that belong to it one after another, and adds them in registers: no atomics, and the
same bits from run to run.

A tile of m queries x n keys costs 2 m n d FLOPs, m n exps, (m + n) d numbers read and the
operations of the derivative: about what a logsumexp costs, and nothing is read ahead.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.gradient_kernels import derivative_by_rows, rows_of_derivative
from regard.backends.triton.tile import kv_end_of


class Shared(NamedTuple):
    """The counts of the parts of a matrix that share an element of the bias; 1: none is shared.

    Attributes:
        batch: batch entries.
        heads: query heads.
        down: tiles of rows; on diagonals 1.
        across: tiles of columns, likewise.
    """

    batch: int
    heads: int
    down: int
    across: int


@triton.jit
def _along_diagonals(tile, BLOCK: tl.constexpr):
    """Return the sums along the diagonals of a square tile, from the lower left on, (2 BLOCK,)."""
    row, diagonal = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    column = diagonal[None, :] - (BLOCK - 1) + row[:, None]
    inside = (column >= 0) & (column < BLOCK)
    return tl.sum(tl.where(inside, tl.gather(tile, tl.where(inside, column, 0), 1), 0.0), 0)


@triton.jit
def bias_gradient_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    norms,
    terms,
    grid,
    left,
    right,
    other_query,
    other_key,
    other_steps,
    other_bias,
    other_limits,
    other_packed,
    other_norms,
    other_numbers,
    sparse,
    shared,
    rows,
    columns,
    gradient,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MET: tl.constexpr,
    LEFT_GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    OTHER_GROUP: tl.constexpr,
    OTHER_DIM: tl.constexpr,
    KIND: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """Compute the gradient of one tile of the bias.

    gradient is (batch, heads, rows, columns) of the bias, whose axes are 1 where they are shared.
    With DIAGONAL it is (batch, num_heads, diagonals of tiles, 2 BLOCK_N): the sums along the
    diagonals of each diagonal of tiles, from the lower left of the matrix on. The other arguments
    are those of the query's gradient.
    """
    q_tiles, kv_tiles = tl.cdiv(shape.q_len, BLOCK_M), tl.cdiv(shape.kv_len, BLOCK_N)
    program = tl.program_id(0).to(tl.int64)
    if DIAGONAL:
        diagonal = program % (q_tiles + kv_tiles - 1)
        program = program // (q_tiles + kv_tiles - 1)
        down, across = (
            tl.maximum(q_tiles - 1 - diagonal, 0),
            tl.maximum(diagonal - (q_tiles - 1), 0),
        )
        count = tl.minimum(q_tiles - down, kv_tiles - across)
    else:
        of_columns, of_rows = kv_tiles // shared.across, q_tiles // shared.down
        across, down = program % of_columns, program // of_columns % of_rows
        program = program // of_columns // of_rows
        count = shared.batch * shared.heads * shared.down * shared.across
    of_heads = shape.num_heads // shared.heads
    of_head, of_batch = program % of_heads, program // of_heads
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(count):
        if DIAGONAL:
            batch, head = of_batch, of_head
            q_first, first = (down + step) * BLOCK_M, (across + step) * BLOCK_N
        else:
            first = (across + step % shared.across) * BLOCK_N
            rest = step // shared.across
            q_first = (down + rest % shared.down) * BLOCK_M
            rest = rest // shared.down
            head, batch = of_head + rest % shared.heads, of_batch + rest // shared.heads
        q_first, first = q_first.to(tl.int32), first.to(tl.int32)
        kv_end = kv_end_of(limits, batch, head, shape)
        (
            q, q_idx, row, start, stop, every_start, every_stop, of_query, top, above, offset,
            slope, lefts, numbers, kept, kept_at, other_q, other_end, other_start, other_stop,
            other_of_query, other_top, other_above, by_other,
        ) = rows_of_derivative(
            query, batch, head, q_first, kv_end, shape, limits, packed, norms, terms, grid, left,
            other_query, other_limits, other_packed, other_norms, other_numbers, HEAD_DIM, WIDTH,
            LEFT_GROUP, OTHER_DIM, BLOCK_M, UPCAST,
        )  # fmt: skip
        if (first < stop) & (first + BLOCK_N > start):
            edge = (first < every_start) | (first + BLOCK_N > every_stop)
            _keys, by_score = derivative_by_rows(
                q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias,
                limits, packed, top, above, offset, slope, terms, grid, numbers, kept, kept_at,
                lefts, left, right, other_q, other_key, other_of_query, other_start, other_stop,
                other_end, other_top, other_above, by_other, other_steps, other_bias,
                other_limits, other_packed, other_numbers, GROUP, HEAD_DIM, WIDTH, MET,
                OTHER_GROUP, OTHER_DIM, KIND, BLOCK_N, UPCAST,
            )  # fmt: skip
            if sparse.numbers is not None:
                here, kv_idx = q_idx < shape.q_len, first + tl.arange(0, BLOCK_N)
                for entry in range(COUNT):
                    its_key = tl.load(sparse.keys + row * COUNT + entry, mask=here, other=-1)
                    number = tl.load(sparse.numbers + row * COUNT + entry, mask=here, other=0.0)
                    meets = its_key[:, None] == kv_idx[None, :]
                    by_score += tl.where(meets, number[:, None], 0.0)
            total += by_score
    if DIAGONAL:
        into = gradient + tl.program_id(0).to(tl.int64) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        tl.store(into, _along_diagonals(total, BLOCK_N))
    else:
        row = down * BLOCK_M + tl.arange(0, BLOCK_M)
        column = across * BLOCK_N + tl.arange(0, BLOCK_N)
        # The sum stands in every place of the axis, and the first one is stored.
        if SUM_ROWS:
            total = tl.sum(total, 0)[None, :] + tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if SUM_COLUMNS:
            total = tl.sum(total, 1)[:, None] + tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        into = gradient + program * rows * columns + row[:, None] * columns + column[None, :]
        tl.store(into, total, mask=(row < rows)[:, None] & (column < columns)[None, :])
