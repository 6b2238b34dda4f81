"""The gradient of every statistic, given the norms of the rows: by rows, and by keys.

Let W be the weights and G the derivative of a loss by W. Then the derivative by the scores is

    dS = W (G - D) + u W + sparse    D the sum of W G over a row, u the derivative by the logsumexp

    G = -a (log W + 1)     entropy, a the derivative by it
      + b                  sums of rows
      + c_j                sums of columns
      + P[r(i), c(j)]      cells: pooled maps and segments
      + x_i · y_j          products: the transposed matrix times x, y the derivative by it
      + a term of the logarithm of another matrix's weight    divergences: ``divergence_kernels``

All that depends on the row alone is one number, ``offset``: u + b - a - D. The k largest weights
and the largest score add a few numbers to each row; they are the sparse part. The query's gradient
is scale · dS @ key, the key's scale · dSᵀ @ query. dS is computed once for each of them, so that no
program adds to what another one writes: no atomics, and the same bits from run to run.

A tile of m queries x n keys costs 4 m n d FLOPs, twice those of its scores, m n exps, d numbers
read for each token of the other side and about four operations for each score. Both kernels
together cost the products of two forwards, and beside sparse numbers, in 16 bits, those of three; a
fused backward of an output costs those of 2.5.

Source: the derivative of the softmax, recomputed as in FlashAttention-2 (Dao 2023, Algorithm 2).
The terms of G are ours; the tests compare them with float64.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.divergence_kernels import with_other
from regard.backends.triton.tile import (
    LEAST,
    columns_seen,
    kv_end_of,
    log_weights,
    norms_of,
    rows_of,
    rows_seen,
    tile_by_keys,
    tile_by_rows,
    tile_of,
    visit,
    visits_of,
)


class Grid(NamedTuple):
    """A number for each cell of a grid over the matrix, float32.

    Attributes:
        numbers: (batch, num_heads, height, width); None: there is no grid.
        rows: int32, (q_len,): the row of the grid that a query lies in; -1 - n in none, with n the
            row of the next query that lies in one.
        columns: int32, (kv_len,): the column that a key lies in, likewise.
        height: the number of rows of the grid.
        width: the number of its columns.
    """

    numbers: Any
    rows: Any
    columns: Any
    height: int
    width: int


class Terms(NamedTuple):
    """The derivative of a loss by the weights, each float32; None: the term is 0.

    A kernel takes the grid, the product and the other matrix of a divergence beside it: Triton 3.6
    loses the numbers of a tuple inside a tuple.

    Attributes:
        slope: times log2 of the weight, (batch, num_heads, q_len).
        offset: a number for each row, of the same shape.
        columns: a number for each key, (batch, num_heads, kv_len).
    """

    slope: Any
    offset: Any
    columns: Any


class Sparse(NamedTuple):
    """The derivative of a loss by a few scores of each row.

    Attributes:
        keys: int32, by row (batch, num_heads, q_len, COUNT), or sorted (batch, kv_heads, entries).
        numbers: float32, of the same shape; None: there are none.
        rows: int32, of sorted entries the head of the group times q_len, plus the query.
        first: int32, (batch, kv_heads, tiles of keys + 1): the first sorted entry of each tile.
    """

    keys: Any
    numbers: Any
    rows: Any
    first: Any


@triton.jit
def _cell_of(places, token, here):
    """Return the row or the column of a grid that each token lies in; below 0: in none."""
    return tl.load(places + token, mask=here, other=-1)


@triton.jit
def _with_grid(found, numbers, kept_at, kept, read, of_first, of_last, stride, MET: tl.constexpr):
    """Add the numbers of the cells of a tile.

    ``kept`` are the cells of the tokens that the program keeps, and kept_at where their numbers
    stand; ``read`` those of the other tokens, a stride apart, with that of the first and the last.
    MET is how many cells those lie in: 1, 2 that touch each other, or 0 for any number.
    """
    if MET == 0:
        start = tl.where(of_first < 0, -1 - of_first, of_first)
        end = tl.where(of_last < 0, -1 - of_last, of_last + 1)
        for cell in range(start, end):
            number = tl.load(numbers + kept_at + cell * stride, mask=kept >= 0, other=0.0)
            found += tl.where(read == cell, number, 0.0)
    else:
        there = ((kept >= 0) & (of_first >= 0)) != 0  # in Triton 3.9's interpreter & gives numbers
        number = tl.load(numbers + kept_at + of_first * stride, mask=there, other=0.0)
        if MET == 2:
            last = tl.load(numbers + kept_at + of_last * stride, mask=there, other=0.0)
            found += tl.where(read == of_first, number, last)
        else:
            found += number
    return found


@triton.jit
def _numbers_of(pointer, at, here):
    """Load one number for each token; 0 without a pointer."""
    found = tl.zeros(at.shape, tl.float32)
    if pointer is not None:
        found = tl.load(pointer + at, mask=here, other=0.0)
    return found


@triton.jit
def _of_scores(x, weights, by_weight, taken, steps):
    """Return the derivative by scale · query · key, from that by the weights, less ``taken``."""
    by_score = weights * by_weight - taken
    if steps.softcap is not None:
        capped = tl.where(x == float("-inf"), 0.0, x) / steps.softcap
        by_score = by_score * (1.0 - capped * capped)
    return by_score


@triton.jit
def _with_product(total, by_score, tokens, sparse_numbers, UPCAST: tl.constexpr):
    """Add by_score @ tokens, for which by_score is rounded to the dtype of the tokens.

    Beside sparse numbers the loss of rounding is multiplied, too: a row that looks at one key has
    -D W there, to which W G is added, and the gradient is made of what little remains.
    """
    rounded = by_score.to(tokens.dtype)
    rest = (by_score - rounded.to(tl.float32)).to(tokens.dtype)
    IS_ROUNDED: tl.constexpr = tokens.dtype != tl.float32
    if UPCAST:
        rounded, rest, tokens = rounded.to(tl.float32), rest.to(tl.float32), tokens.to(tl.float32)
    if IS_ROUNDED and sparse_numbers is not None:
        total = tl.dot(rest, tokens, total, input_precision="ieee")
    return tl.dot(rounded, tokens, total, input_precision="ieee")


@triton.jit
def rows_of_derivative(
    query, batch, head, q_first, kv_end, shape, limits, packed, norms, terms, grid, left,
    other_query, other_limits, other_packed, other_norms, other_numbers,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, LEFT_GROUP: tl.constexpr, OTHER_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load what ``derivative_by_rows`` needs of a tile of queries; numbers for terms that are None.

    It is the same for all tiles of keys.
    """
    q_idx = q_first + tl.arange(0, BLOCK_M)
    here = q_idx < shape.q_len
    q = tile_of(query, batch, head, q_first, shape.q_len, HEAD_DIM, BLOCK_M)
    start, stop, every_start, every_stop, of_query = rows_seen(
        q_first, q_idx, here, kv_end, batch, head, shape, limits, packed
    )
    at = (batch * shape.num_heads + head).to(tl.int64)
    row = at * shape.q_len + q_idx
    top, above = norms_of(norms, row, here)
    offset = tl.load(terms.offset + row, mask=here, other=0.0)
    slope = _numbers_of(terms.slope, row, here)
    lefts = q
    if left.pointer is not None:
        lefts = tile_of(left, batch, head // LEFT_GROUP, q_first, shape.q_len, WIDTH, BLOCK_M)
        if UPCAST:
            lefts = lefts.to(tl.float32)
    numbers, kept, kept_at = norms.top, q_idx, q_idx
    if grid.numbers is not None:
        kept = _cell_of(grid.rows, q_idx, here)
        numbers = grid.numbers + at * grid.height * grid.width
        kept_at = kept * grid.width
    other_q, other_end, other_start, other_stop, other_of_query = q, kv_end, start, stop, of_query
    other_top, other_above, by_other = top, above, above
    if other_numbers is not None:
        other_q = tile_of(other_query, batch, head, q_first, shape.q_len, OTHER_DIM, BLOCK_M)
        other_end = kv_end_of(other_limits, batch, head, shape)
        _, _, other_start, other_stop, other_of_query = rows_seen(
            q_first, q_idx, here, other_end, batch, head, shape, other_limits, other_packed
        )
        other_top, other_above = norms_of(other_norms, row, here)
        by_other = tl.load(other_numbers + row, mask=here, other=0.0)
    return (
        q, q_idx, row, start, stop, every_start, every_stop, of_query, top, above, offset, slope,
        lefts, numbers, kept, kept_at, other_q, other_end, other_start, other_stop, other_of_query,
        other_top, other_above, by_other,
    )  # fmt: skip


@triton.jit
def derivative_by_rows(
    q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias, limits, packed,
    top, above, offset, slope, terms, grid, numbers, kept, kept_at, lefts, left, right,
    other_q, other_key, other_of_query, other_start, other_stop, other_end, other_top, other_above,
    by_other, other_steps, other_bias, other_limits, other_packed, other_numbers,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MET: tl.constexpr,
    OTHER_GROUP: tl.constexpr, OTHER_DIM: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return a tile of keys of one head, and the derivative by its scores, without the sparse part.

    The scores are those before the softcap, and after scale and bias; queries are the rows.
    """
    kv_idx = first + tl.arange(0, BLOCK_N)
    keys, x = tile_by_rows(
        q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias, limits,
        packed, GROUP, HEAD_DIM, BLOCK_N, UPCAST,
    )  # fmt: skip
    weights, bits = log_weights(x, top[:, None], above[:, None], steps, bias.pointer is not None)
    by_weight = offset[:, None] + tl.zeros((q_idx.shape[0], BLOCK_N), tl.float32)
    if terms.slope is not None:
        by_weight += slope[:, None] * tl.maximum(bits, LEAST)
    if terms.columns is not None:
        at = (batch * shape.num_heads + head).to(tl.int64)
        there = kv_idx < shape.kv_len
        column = tl.load(terms.columns + at * shape.kv_len + kv_idx, mask=there, other=0.0)
        by_weight += column[None, :]
    if grid.numbers is not None:
        read = _cell_of(grid.columns, kv_idx, kv_idx < shape.kv_len)
        of_first = tl.load(grid.columns + first)
        of_last = tl.load(grid.columns + tl.minimum(first + BLOCK_N, shape.kv_len) - 1)
        by_weight = _with_grid(
            by_weight, numbers, kept_at[:, None], kept[:, None], read[None, :], of_first, of_last,
            1, MET,
        )  # fmt: skip
    if left.pointer is not None:
        rights = tile_of(right, batch, head, first, shape.kv_len, WIDTH, BLOCK_N)
        if UPCAST:
            rights = rights.to(tl.float32)
        by_weight += tl.dot(lefts, rights.T, input_precision="ieee")
    taken = 0.0
    if other_numbers is not None:
        other_edge = (first < other_start) | (first + BLOCK_N > other_stop)
        _other_keys, y = tile_by_rows(
            other_q, other_key, q_idx, other_of_query, other_edge, other_end, batch, head, first,
            shape, other_steps, other_bias, other_limits, other_packed, OTHER_GROUP, OTHER_DIM,
            BLOCK_N, UPCAST,
        )  # fmt: skip
        by_weight, taken = with_other(
            by_weight, bits, y, other_top[:, None], other_above[:, None], by_other[:, None],
            other_steps, KIND,
        )  # fmt: skip
    return keys, _of_scores(x, weights, by_weight, taken, steps)


@triton.jit
def row_products_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    visits,
    norms,
    terms,
    grid,
    left,
    right,
    sums,
    products,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT_GROUP: tl.constexpr,
    MET: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute, of one tile of queries of one head, the row sums of W G and the product W @ right.

    right is (batch, num_heads, kv_len, WIDTH). Of G only columns, cells and left · right are
    summed, (batch, num_heads, q_len). The product has the shape (batch, num_heads, q_len, WIDTH).
    None: not asked. The sums use the weights that the derivative by the scores has: those of the
    product are rounded to its dtype, and with them the small gradient of a row that looks at one
    key would be made of rounding.
    """
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
    at = (batch * shape.num_heads + head).to(tl.int64)
    top, above = norms_of(norms, at * shape.q_len + q_idx, here)
    if grid.numbers is not None:
        kept = _cell_of(grid.rows, q_idx, here)
        numbers = grid.numbers + at * grid.height * grid.width
        kept_at = kept * grid.width
    lefts = q
    if left.pointer is not None:
        lefts = tile_of(
            left, batch, head // LEFT_GROUP, tile * BLOCK_M, shape.q_len, WIDTH, BLOCK_M
        )
        if UPCAST:
            lefts = lefts.to(tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if products is not None:
        WIDE: tl.constexpr = max(16, triton.next_power_of_2(WIDTH))
        product = tl.zeros((BLOCK_M, WIDE), tl.float32)
    visits_at, begin, end = visits_of(visits, batch, head, tile, start, stop, BLOCK_N)
    for step in range(begin, end):
        first, edge = visit(visits, visits_at, step, every_start, every_stop, BLOCK_N)
        kv_idx = first + tl.arange(0, BLOCK_N)
        _keys, x = tile_by_rows(
            q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias, limits,
            packed, GROUP, HEAD_DIM, BLOCK_N, UPCAST,
        )  # fmt: skip
        weights, _ = log_weights(x, top[:, None], above[:, None], steps, True)
        if right.pointer is not None:
            rights = tile_of(right, batch, head, first, shape.kv_len, WIDTH, BLOCK_N)
            if UPCAST:
                rights = rights.to(tl.float32)
        if sums is not None:
            by_weight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if terms.columns is not None:
                there = kv_idx < shape.kv_len
                column = tl.load(terms.columns + at * shape.kv_len + kv_idx, mask=there, other=0.0)
                by_weight += column[None, :]
            if grid.numbers is not None:
                read = _cell_of(grid.columns, kv_idx, kv_idx < shape.kv_len)
                of_first = tl.load(grid.columns + first)
                last = tl.minimum(first + BLOCK_N, shape.kv_len) - 1
                of_last = tl.load(grid.columns + last)
                by_weight = _with_grid(
                    by_weight, numbers, kept_at[:, None], kept[:, None], read[None, :], of_first,
                    of_last, 1, MET,
                )  # fmt: skip
            if left.pointer is not None:
                by_weight += tl.dot(lefts, rights.T, input_precision="ieee")
            total += tl.sum(weights * by_weight, 1)
        if products is not None:
            weights = weights.to(right.pointer.dtype.element_ty)
            if UPCAST:
                weights = weights.to(tl.float32)
            product = tl.dot(weights, rights, product, input_precision="ieee")
    if sums is not None:
        tl.store(sums + at * shape.q_len + q_idx, total, mask=here)
    if products is not None:
        d = tl.arange(0, WIDE)
        into = products + (at * shape.q_len + q_idx)[:, None] * WIDTH + d[None, :]
        tl.store(into, product, mask=here[:, None] & (d < WIDTH)[None, :])


@triton.jit
def query_gradient_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    visits,
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
):
    """Compute the gradient of one tile of queries of one head; the longest rows come first.

    left, (batch, heads, q_len, WIDTH), with grouped heads, times right, (batch, num_heads, kv_len,
    WIDTH), is the derivative by the weights of a product. The other matrix is that of a divergence,
    other_numbers the derivative by it, (batch, num_heads, q_len), and other_norms those of its
    rows.
    """
    tiles = tl.cdiv(shape.q_len, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // shape.num_heads
    head = tl.program_id(0) // tiles % shape.num_heads
    kv_end = kv_end_of(limits, batch, head, shape)
    (
        q, q_idx, row, start, stop, every_start, every_stop, of_query, top, above, offset, slope,
        lefts, numbers, kept, kept_at, other_q, other_end, other_start, other_stop, other_of_query,
        other_top, other_above, by_other,
    ) = rows_of_derivative(
        query, batch, head, tile * BLOCK_M, kv_end, shape, limits, packed, norms, terms, grid, left,
        other_query, other_limits, other_packed, other_norms, other_numbers, HEAD_DIM, WIDTH,
        LEFT_GROUP, OTHER_DIM, BLOCK_M, UPCAST,
    )  # fmt: skip
    here = q_idx < shape.q_len
    total = tl.zeros((BLOCK_M, q.shape[1]), tl.float32)
    visits_at, begin, end = visits_of(visits, batch, head, tile, start, stop, BLOCK_N)
    for step in range(begin, end):
        first, edge = visit(visits, visits_at, step, every_start, every_stop, BLOCK_N)
        keys, by_score = derivative_by_rows(
            q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias, limits,
            packed, top, above, offset, slope, terms, grid, numbers, kept, kept_at, lefts, left,
            right, other_q, other_key, other_of_query, other_start, other_stop, other_end,
            other_top, other_above, by_other, other_steps, other_bias, other_limits, other_packed,
            other_numbers, GROUP, HEAD_DIM, WIDTH, MET, OTHER_GROUP, OTHER_DIM, KIND, BLOCK_N,
            UPCAST,
        )  # fmt: skip
        total = _with_product(total, by_score, keys, sparse.numbers, UPCAST)
    if sparse.numbers is not None:
        for place in range(COUNT):
            its_key = tl.load(sparse.keys + row * COUNT + place, mask=here, other=0)
            number = tl.load(sparse.numbers + row * COUNT + place, mask=here, other=0.0)
            keys = rows_of(key, batch, head // GROUP + 0 * its_key, its_key, here, HEAD_DIM)
            total += number[:, None] * keys.to(tl.float32)
    d = tl.arange(0, q.shape[1])
    into = gradient + row[:, None] * HEAD_DIM + d[None, :]
    stored = here[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(into, total * steps.scale, mask=stored)


@triton.jit
def key_gradient_kernel(
    query,
    key,
    shape,
    steps,
    bias,
    limits,
    packed,
    visits,
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
):
    """Compute the gradient of one tile of keys, of all heads that share them.

    The arguments are those of the query's gradient.
    """
    tiles = tl.cdiv(shape.kv_len, BLOCK_N)
    tile = tl.program_id(0) % tiles
    kv_heads = shape.num_heads // GROUP
    batch = tl.program_id(0) // tiles // kv_heads
    kv_head = tl.program_id(0) // tiles % kv_heads
    kv_first = tile * BLOCK_N
    kv_idx = kv_first + tl.arange(0, BLOCK_N)
    there = kv_idx < shape.kv_len
    keys = tile_of(key, batch, kv_head, kv_first, shape.kv_len, HEAD_DIM, BLOCK_N)
    total = tl.zeros((BLOCK_N, keys.shape[1]), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        kv_end = kv_end_of(limits, batch, head, shape)
        start, stop, every_start, every_stop, of_key = columns_seen(
            kv_first, kv_idx, kv_end, batch, head, shape, limits, packed
        )
        at = (batch * shape.num_heads + head).to(tl.int64)
        column = _numbers_of(terms.columns, at * shape.kv_len + kv_idx, there)
        if grid.numbers is not None:
            kept = _cell_of(grid.columns, kv_idx, there)
            numbers = grid.numbers + at * grid.height * grid.width
        if left.pointer is not None:
            rights = tile_of(right, batch, head, kv_first, shape.kv_len, WIDTH, BLOCK_N)
            if UPCAST:
                rights = rights.to(tl.float32)
        if other_numbers is not None:
            other_keys = tile_of(
                other_key, batch, head // OTHER_GROUP, kv_first, shape.kv_len, OTHER_DIM, BLOCK_N
            )
            other_end = kv_end_of(other_limits, batch, head, shape)
            _, _, other_start, other_stop, other_of_key = columns_seen(
                kv_first, kv_idx, other_end, batch, head, shape, other_limits, other_packed
            )
        visits_at, begin, end = visits_of(visits, batch, head, tile, start, stop, BLOCK_M)
        for step in range(begin, end):
            first, edge = visit(visits, visits_at, step, every_start, every_stop, BLOCK_M)
            q_idx = first + tl.arange(0, BLOCK_M)
            here = q_idx < shape.q_len
            q, x = tile_by_keys(
                query, keys, kv_idx, of_key, edge, kv_end, batch, head, first, kv_first, shape,
                steps, bias, limits, packed, HEAD_DIM, BLOCK_M, BLOCK_N, UPCAST,
            )  # fmt: skip
            row = at * shape.q_len + q_idx
            top, above = norms_of(norms, row, here)
            weights, bits = log_weights(
                x, top[None, :], above[None, :], steps, bias.pointer is not None
            )
            offset = tl.load(terms.offset + row, mask=here, other=0.0)
            by_weight = offset[None, :] + tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if terms.slope is not None:
                slope = tl.load(terms.slope + row, mask=here, other=0.0)
                by_weight += slope[None, :] * tl.maximum(bits, LEAST)
            if terms.columns is not None:
                by_weight += column[:, None]
            if grid.numbers is not None:
                read = _cell_of(grid.rows, q_idx, here)
                of_first = tl.load(grid.rows + first)
                of_last = tl.load(grid.rows + tl.minimum(first + BLOCK_M, shape.q_len) - 1)
                by_weight = _with_grid(
                    by_weight, numbers, kept[:, None], kept[:, None], read[None, :], of_first,
                    of_last, grid.width, MET,
                )  # fmt: skip
            if left.pointer is not None:
                lefts = tile_of(left, batch, head // LEFT_GROUP, first, shape.q_len, WIDTH, BLOCK_M)
                if UPCAST:
                    lefts = lefts.to(tl.float32)
                by_weight += tl.dot(rights, lefts.T, input_precision="ieee")
            taken = 0.0
            if other_numbers is not None:
                other_edge = (first < other_start) | (first + BLOCK_M > other_stop)
                _other_q, y = tile_by_keys(
                    other_query, other_keys, kv_idx, other_of_key, other_edge, other_end, batch,
                    head, first, kv_first, shape, other_steps, other_bias, other_limits,
                    other_packed, OTHER_DIM, BLOCK_M, BLOCK_N, UPCAST,
                )  # fmt: skip
                top, above = norms_of(other_norms, row, here)
                by_other = tl.load(other_numbers + row, mask=here, other=0.0)
                by_weight, taken = with_other(
                    by_weight, bits, y, top[None, :], above[None, :], by_other[None, :],
                    other_steps, KIND,
                )  # fmt: skip
            by_score = _of_scores(x, weights, by_weight, taken, steps)
            total = _with_product(total, by_score, q, sparse.numbers, UPCAST)
    at = (batch * kv_heads + kv_head).to(tl.int64)
    if sparse.numbers is not None:
        entries = at * shape.q_len * GROUP * COUNT
        begin = tl.load(sparse.first + at * (tiles + 1) + tile)
        end = tl.load(sparse.first + at * (tiles + 1) + tile + 1)
        for first in range(begin, end, BLOCK_M):
            entry = first + tl.arange(0, BLOCK_M)
            exists = entry < end
            its_key = tl.load(sparse.keys + entries + entry, mask=exists, other=-1)
            number = tl.load(sparse.numbers + entries + entry, mask=exists, other=0.0)
            its_row = tl.load(sparse.rows + entries + entry, mask=exists, other=0)
            head = kv_head * GROUP + its_row // shape.q_len
            q = rows_of(query, batch, head, its_row % shape.q_len, exists, HEAD_DIM)
            by_score = tl.where(its_key[None, :] == kv_idx[:, None], number[None, :], 0.0)
            total = _with_product(total, by_score, q, sparse.numbers, UPCAST)
    d = tl.arange(0, keys.shape[1])
    into = gradient + (at * shape.kv_len + kv_idx)[:, None] * HEAD_DIM + d[None, :]
    tl.store(into, total * steps.scale, mask=there[:, None] & (d < HEAD_DIM)[None, :])
