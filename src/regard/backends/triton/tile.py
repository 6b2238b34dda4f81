"""Device functions that compute one tile of scores in registers; every kernel uses them.

A kernel keeps the tokens of one side, reads the other side tile by tile, and accumulates its
statistics from each tile of scores. A tile of m queries x n keys takes

    2 m n d FLOPs on the tensor cores    for q kᵀ, with d = head_dim
    m n exps                             if weights are needed (16 per clock and multiprocessor)
    (m or n) d numbers                   read from L2; the other side stays in registers

On Hopper this is half of a forward's matrix products (4096 FLOPs per clock) and all of its exps.
The floor is therefore 0.5 forwards for d = 128, and 1 for d = 64, where the exps dominate.

Scores are kept in float32 as they are: ``score · to_bits`` is the score in bits, so that one fused
multiply-add and one exp2 turn it into a weight. Offsets into tensors are int64; inside a tile they
are int32.
"""

# Inside a kernel everything is Triton's, which has no types of its own there.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-200.0)  # in bits; in float32 2^-200 is 0, and times it -200 is 0
FAR = tl.constexpr(2**30)  # beyond every position
SIDE = tl.constexpr(64)  # tokens on each side of a square of a packed mask
AT_ONCE = tl.constexpr(16)  # dimensions of a product outside the matrix units
WHOLE, HIDDEN = tl.constexpr(-1), tl.constexpr(-2)  # squares without bits


class Tokens(NamedTuple):
    """A query or a key, and the strides of its axes; its last stride is 1."""

    pointer: Any
    batch: int
    head: int
    token: int


class MatrixNumbers(NamedTuple):
    """Numbers of the shape of the matrix, and the strides of its axes; 0 where they repeat."""

    pointer: Any
    batch: int
    head: int
    row: int
    column: int


class Shape(NamedTuple):
    """The shape of the matrix."""

    q_len: int
    kv_len: int
    num_heads: int


class Steps(NamedTuple):
    """The steps from query · key to softcap(scale · query · key + bias); None skips a step."""

    scale: float
    softcap: float | None
    to_bits: float


class Norms(NamedTuple):
    """The numbers that turn the scores of a row into weights, float32, (batch, num_heads, q_len).

    Their sum is the logsumexp. They are kept apart because a float32 sum would lose ``above`` next
    to a largest score of -1e9.

    Attributes:
        top: the largest score; -inf in a row without keys.
        above: logsumexp minus top, in bits; NaN where a score is NaN or inf.
    """

    top: Any
    above: Any


class Limits(NamedTuple):
    """The limits on the keys that a query may attend to, by position; None if there is no limit.

    Attributes:
        low: the lowest kv_idx - q_idx.
        high: the highest.
        lengths: how many keys each sequence has.
        first: of each key the first key of its document, by which the document is known.
        stop: of each key one past the last key of its document.
        shift: the position of the first query on the axis of the keys.
    """

    low: int | None
    high: int | None
    lengths: Any
    lengths_batch: int
    lengths_head: int
    first: Any
    stop: Any
    document_batch: int
    document_head: int
    shift: int


class Packed(NamedTuple):
    """A mask as bits, of squares of queries and keys; see ``packed_mask.py``.

    Attributes:
        slots: int32, (batch, num_heads, row squares, column squares): where its bits stand in
            ``words``, or WHOLE or HIDDEN; None: the limits are the whole mask.
        words: int32, (slots, SIDE, SIDE / 32): one bit for each key.
        batch: stride of slots; 0 where all batch entries share them.
        head: likewise.
        width: the number of column squares.
    """

    slots: Any
    words: Any
    batch: int
    head: int
    width: int


class Visits(NamedTuple):
    """The tiles that a program reads, where a packed mask hides others.

    Attributes:
        entries: int32, (batch, heads, programs, width): twice the number of a tile, plus 1 where
            its bits decide; None: a range of tiles.
        counts: int32, (batch, heads, programs): how many.
        batch: stride of counts; 0 where all batch entries share them.
        head: likewise.
        width: the number of all tiles.
    """

    entries: Any
    counts: Any
    batch: int
    head: int
    width: int


@triton.jit
def tile_of(tokens, batch, head, start, count, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK tokens of one head from ``start`` on, (BLOCK, BLOCK_D); 0 from ``count`` on."""
    return tokens_of(tokens, batch, head, start, tl.arange(0, BLOCK), count, HEAD_DIM)


@triton.jit
def tokens_of(tokens, batch, head, start, i, count, HEAD_DIM: tl.constexpr):
    """Load the tokens ``start`` + i of one head, (entries of i, BLOCK_D); 0 from ``count`` on."""
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(HEAD_DIM))
    base = batch.to(tl.int64) * tokens.batch + head.to(tl.int64) * tokens.head
    base += tl.cast(start, tl.int64) * tokens.token
    d = tl.arange(0, BLOCK_D)
    pointers = tokens.pointer + base + (i[:, None] * tokens.token + d[None, :])
    here = (start + i < count)[:, None]
    if BLOCK_D != HEAD_DIM:
        here = here & (d < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=here, other=0.0)


@triton.jit
def packed_rows(shape, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Assign a tile of rows, of all query heads of one key head, to this program; last rows first.

    Returns the tile number, the batch, the key head, and for each row its query, its head, and True
    if the query exists.
    """
    kv_heads = shape.num_heads // GROUP
    tiles = tl.cdiv(shape.q_len * GROUP, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch, kv_head = tl.program_id(0) // tiles // kv_heads, tl.program_id(0) // tiles % kv_heads
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_idx = row // GROUP
    return tile, batch, kv_head, q_idx, kv_head * GROUP + row % GROUP, q_idx < shape.q_len


@triton.jit
def rows_of(tokens, batch, head, token, here, HEAD_DIM: tl.constexpr):
    """Load one token for each entry of ``token`` and ``head``, (entries, BLOCK_D), or 0."""
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(HEAD_DIM))
    d = tl.arange(0, BLOCK_D)
    rows = head.to(tl.int64) * tokens.head + token.to(tl.int64) * tokens.token
    pointers = tokens.pointer + batch.to(tl.int64) * tokens.batch + rows[:, None] + d[None, :]
    mask = here[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _numbers_of(numbers, batch, head, q_idx, kv_idx, shape, other):
    """Load the numbers at queries and keys whose shapes broadcast to the tile."""
    of_row = head.to(tl.int64) * numbers.head + q_idx.to(tl.int64) * numbers.row
    pointers = numbers.pointer + batch.to(tl.int64) * numbers.batch + of_row
    here = (q_idx < shape.q_len) & (kv_idx < shape.kv_len)
    return tl.load(pointers + kv_idx.to(tl.int64) * numbers.column, mask=here, other=other)


@triton.jit
def _tanh(x):
    """Compute tanh to within a few roundings, also near 0."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2E)) + 1.0)
    square = x * x
    series = 2 / 15 + square * (-17 / 315 + square * (62 / 2835))
    near = size * (1.0 + square * (-1 / 3 + square * series))
    found = tl.where(size < 0.25, near, far)
    return tl.where(x < 0, -found, found)


@triton.jit
def scores(left, right, q_idx, kv_idx, batch, head, shape, steps, bias, UPCAST: tl.constexpr):
    """Compute left @ right with bias and softcap, unmasked; times ``to_bits`` it is in bits."""
    if UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    x = tl.dot(left, right, input_precision="ieee")
    return stepped(x, q_idx, kv_idx, batch, head, shape, steps, bias)


@triton.jit
def products_at(
    query, key, batch, head, kv_head, q_idx, kv_idx, here, there, HEAD_DIM: tl.constexpr
):
    """Compute query · key of some keys of each row, (rows, keys), in float32."""
    of_query = head.to(tl.int64) * query.head + q_idx.to(tl.int64) * query.token
    of_query += batch.to(tl.int64) * query.batch
    of_key = kv_head.to(tl.int64) * key.head + kv_idx.to(tl.int64) * key.token
    of_key += batch.to(tl.int64) * key.batch
    x = tl.zeros(kv_idx.shape, tl.float32)
    for start in range(0, HEAD_DIM, AT_ONCE):
        d = start + tl.arange(0, AT_ONCE)
        inside = d < HEAD_DIM
        mask = here[:, None] & inside[None, :]
        q = tl.load(query.pointer + of_query[:, None] + d[None, :], mask=mask, other=0.0)
        mask = there[:, :, None] & inside[None, None, :]
        k = tl.load(key.pointer + of_key[:, :, None] + d[None, None, :], mask=mask, other=0.0)
        x += tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32), 2)
    return x


@triton.jit
def stepped(x, q_idx, kv_idx, batch, head, shape, steps, bias):
    """Apply scale, bias and softcap to query · key; times ``to_bits`` the scores are in bits."""
    if bias.pointer is not None or steps.softcap is not None:
        x = x * steps.scale
        if bias.pointer is not None:
            x += _numbers_of(bias, batch, head, q_idx, kv_idx, shape, 0.0).to(tl.float32)
        if steps.softcap is not None:
            x = steps.softcap * _tanh(x / steps.softcap)
    return x


@triton.jit
def _allowed(q_idx, kv_idx, of_query, of_key, kv_end, limits):
    """Return True where limits let a query attend to a key; of_query and of_key are documents."""
    found = kv_idx < kv_end
    if limits.low is not None:
        found = found & (kv_idx - q_idx >= limits.low)
    if limits.high is not None:
        found = found & (kv_idx - q_idx <= limits.high)
    if limits.first is not None:
        found = found & (of_query == of_key)
    return found


@triton.jit
def _bits(packed, batch, head, q_idx, kv_idx, here):
    """Load the words of a packed mask that hold the bits of these queries and keys."""
    at = batch.to(tl.int64) * packed.batch + head.to(tl.int64) * packed.head
    at = at + q_idx // SIDE * packed.width + kv_idx // SIDE
    # In the interpreter of Triton 3.9 the result of & is a whole number.
    slot = tl.load(packed.slots + at, mask=here != 0, other=HIDDEN)
    at = slot.to(tl.int64) * (SIDE * SIDE // 32) + q_idx % SIDE * (SIDE // 32)
    word = tl.load(packed.words + at + kv_idx % SIDE // 32, mask=slot >= 0, other=-1)
    return tl.where(slot == HIDDEN, 0, word)


@triton.jit
def allowed_at(q_idx, kv_idx, of_query, of_key, kv_end, batch, head, shape, limits, packed):
    """Return True where the mask lets a query attend to a key, for any queries and keys."""
    if packed.slots is not None:
        here = (q_idx < shape.q_len) & (kv_idx < shape.kv_len)
        word = _bits(packed, batch, head, q_idx, kv_idx, here)
        found = (word >> (kv_idx % 32)) & 1 != 0
    else:
        found = _allowed(q_idx, kv_idx, of_query, of_key, kv_end, limits)
    return found


@triton.jit
def _allowed_in_tile(
    q_idx, kv_idx, of_query, of_key, kv_end, batch, head, shape, limits, packed, first,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return True where the mask lets a query attend to a key of the tile that starts at ``first``.

    q_idx and head have an axis of length 1 for the keys, kv_idx one for the queries. A word has the
    bits of 32 keys, so it is loaded once for each query.
    """
    if packed.slots is not None:
        found = (q_idx < 0) & (kv_idx < 0)
        for place in tl.static_range((BLOCK_N + 31) // 32):
            start = first + 32 * place
            here = (q_idx < shape.q_len) & (start < shape.kv_len)
            word = _bits(packed, batch, head, q_idx, start + 0 * q_idx, here)
            bit = (word >> (kv_idx % 32)) & 1 != 0
            found = found | (bit & (kv_idx // 32 == start // 32))
    else:
        found = _allowed(q_idx, kv_idx, of_query, of_key, kv_end, limits)
    return found


@triton.jit
def document(limits, batch, head, position, here):
    """Return the first key and one past the last key of the documents at positions, or -1, 0."""
    here = here & (position >= 0)
    at = batch.to(tl.int64) * limits.document_batch + head.to(tl.int64) * limits.document_head
    first = tl.load(limits.first + at + position, mask=here, other=-1)
    return first, tl.load(limits.stop + at + position, mask=here, other=0)


@triton.jit
def entries_seen(
    q_idx, kv_idx, here, there, kv_end, batch, head, first_head, shape, limits, packed
):
    """Return True where a query of each row may attend to some keys of its own, (rows, keys).

    ``here`` is True where a row exists, ``there`` where a key does; ``first_head`` is the first of
    the heads that share the keys.
    """
    of_query, of_key = q_idx[:, None], kv_idx
    if limits.first is not None:
        position = q_idx[:, None] + limits.shift
        of_query, _ = document(limits, batch, first_head, position, here[:, None])
        of_key, _ = document(limits, batch, first_head, kv_idx, there)
    seen = allowed_at(
        q_idx[:, None],
        kv_idx,
        of_query,
        of_key,
        kv_end,
        batch,
        head[:, None],
        shape,
        limits,
        packed,
    )
    return seen & there


@triton.jit
def seen_scores(
    x, edge, q_idx, kv_idx, of_query, of_key, here, kv_end, batch, head, shape, limits, packed,
    first, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Set the scores of a tile to -inf where the mask hides a key, or where ``here`` is False.

    ``here`` is True where a query exists; None: no sum over the queries asks. q_idx, of_query, here
    and head have an axis of length 1 for the keys, kv_idx and of_key one for the queries. ``first``
    is the first key of the tile; without ``edge`` all keys are visible.
    """
    if edge:
        seen = _allowed_in_tile(
            q_idx, kv_idx, of_query, of_key, kv_end, batch, head, shape, limits, packed, first,
            BLOCK_N,
        )  # fmt: skip
        if here is not None:
            seen = seen & here
        x = tl.where(seen, x, float("-inf"))
    return x


@triton.jit
def rows_seen(q_first, q_idx, here, kv_end, batch, head, shape, limits, packed):
    """Return the keys that any and those that all queries of a tile see; the queries' documents."""
    q_last = tl.minimum(q_first + q_idx.shape[0], shape.q_len) - 1
    start, stop, every_start, every_stop = keys_seen(q_first, q_last, kv_end, limits, packed)
    of_query = q_idx
    if limits.first is not None:
        of_query, its_stop = document(limits, batch, head, q_idx + limits.shift, here)
        start = tl.maximum(start, tl.min(tl.where(of_query < 0, FAR, of_query), 0))
        stop = tl.minimum(stop, tl.max(its_stop, 0))
    return start, stop, every_start, every_stop, of_query


@triton.jit
def columns_seen(kv_first, kv_idx, kv_end, batch, head, shape, limits, packed):
    """Return the queries that see any and those that see all of a tile of keys; its documents."""
    start, stop, every_start, every_stop = _queries_seen(
        kv_first, kv_first + kv_idx.shape[0] - 1, kv_end, shape, limits, packed
    )
    of_key = kv_idx
    if limits.first is not None:
        of_key, its_stop = document(limits, batch, head, kv_idx, kv_idx < kv_end)
        start = tl.maximum(start, tl.min(tl.where(of_key < 0, FAR, of_key), 0) - limits.shift)
        stop = tl.minimum(stop, tl.max(its_stop, 0) - limits.shift)
    return start, stop, every_start, every_stop, of_key


@triton.jit
def documents_of(limits, batch, head, position, here):
    """Return the first key of the documents at positions; the positions where there are none."""
    found = position
    if limits.first is not None:
        found, _ = document(limits, batch, head, position, here)
    return found


@triton.jit
def kv_end_of(limits, batch, head, shape):
    """Return one past the last key that is not padding."""
    end = shape.kv_len + 0 * batch
    if limits.lengths is not None:
        at = batch.to(tl.int64) * limits.lengths_batch + head.to(tl.int64) * limits.lengths_head
        end = tl.minimum(end, tl.load(limits.lengths + at).to(tl.int32))
    return end


@triton.jit
def keys_seen(q_first, q_last, kv_end, limits, packed):
    """Return the range of keys visible to any, and to all, of a range of queries.

    The callers narrow the first range by documents.
    """
    some_start, some_stop = 0 * q_first, kv_end
    every_start, every_stop = 0 * q_first, kv_end
    if limits.low is not None:
        some_start = tl.maximum(some_start, q_first + limits.low)
        every_start = tl.maximum(every_start, q_last + limits.low)
    if limits.high is not None:
        some_stop = tl.minimum(some_stop, q_last + limits.high + 1)
        every_stop = tl.minimum(every_stop, q_first + limits.high + 1)
    if limits.first is not None or packed.slots is not None:
        every_start, every_stop = 0 * q_first + FAR, 0 * q_first
    return some_start, some_stop, every_start, every_stop


@triton.jit
def _queries_seen(kv_first, kv_last, kv_end, shape, limits, packed):
    """Return the range of queries that see any, and that see all, of a range of keys."""
    some_start, some_stop = 0 * kv_first, shape.q_len + 0 * kv_first
    every_start, every_stop = some_start, some_stop
    if limits.low is not None:
        some_stop = tl.minimum(some_stop, kv_last - limits.low + 1)
        every_stop = tl.minimum(every_stop, kv_first - limits.low + 1)
    if limits.high is not None:
        some_start = tl.maximum(some_start, kv_first - limits.high)
        every_start = tl.maximum(every_start, kv_last - limits.high)
    some_stop = tl.where(kv_first < kv_end, some_stop, 0)
    every_stop = tl.where(kv_last < kv_end, every_stop, 0)
    if limits.first is not None or packed.slots is not None:
        every_start, every_stop = 0 * kv_first + FAR, 0 * kv_first
    return some_start, some_stop, every_start, every_stop


@triton.jit
def visits_of(visits, batch, head, program, start, stop, BLOCK: tl.constexpr):
    """Return the place of a program's list, and the range of its tiles or of that list."""
    at = batch.to(tl.int64) * visits.batch + head.to(tl.int64) * visits.head + program
    begin, end = start // BLOCK, tl.cdiv(stop, BLOCK)
    if visits.entries is not None:
        begin, end = 0 * begin, tl.load(visits.counts + at) + 0 * end
    return at * visits.width, begin, end


@triton.jit
def visit(visits, at, step, every_start, every_stop, BLOCK: tl.constexpr):
    """Return the first token of the tile of one step, and True if the mask must be asked in it."""
    first = step * BLOCK
    edge = (first < every_start) | (first + BLOCK > every_stop)
    if visits.entries is not None:
        entry = tl.load(visits.entries + at + step)
        first, edge = entry // 2 * BLOCK, entry % 2 != 0
    return first, edge


@triton.jit
def norms_of(norms, at, here):
    """Load the norms of rows; a row without keys gets a maximum of inf, so weights of 0."""
    top = tl.load(norms.top + at, mask=here, other=float("inf"))
    above = tl.load(norms.above + at, mask=here, other=0.0)
    return tl.where(top == float("-inf"), float("inf"), top), above


@triton.jit
def weights_of(x, top, above, steps):
    """Compute weights from scores and the norms of their rows.

    The maximum is subtracted before scaling: scaling first would round both numbers.
    """
    return tl.exp2((x - top) * steps.to_bits - above)


@triton.jit
def log_weights(x, top, above, steps, CHECKED: tl.constexpr):
    """Return weights, and their logarithms in bits."""
    bits = (x - top) * steps.to_bits - above
    if CHECKED:  # in a row of NaN not even a score of -inf makes 0
        bits = tl.where(x == float("-inf"), float("-inf"), bits)
    return tl.exp2(bits), bits


@triton.jit
def tile_by_rows(
    q, key, q_idx, of_query, edge, kv_end, batch, head, first, shape, steps, bias, limits, packed,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys of one head, and compute its masked scores with queries as the rows."""
    kv_idx = first + tl.arange(0, BLOCK_N)
    keys = tile_of(key, batch, head // GROUP, first, shape.kv_len, HEAD_DIM, BLOCK_N)
    x = scores(q, keys.T, q_idx[:, None], kv_idx[None, :], batch, head, shape, steps, bias, UPCAST)
    of_key = documents_of(limits, batch, head, kv_idx, kv_idx < kv_end)
    x = seen_scores(
        x, edge, q_idx[:, None], kv_idx[None, :], of_query[:, None], of_key[None, :], None, kv_end,
        batch, head, shape, limits, packed, first, BLOCK_N,
    )  # fmt: skip
    return keys, x


@triton.jit
def tile_by_keys(
    query, keys, kv_idx, of_key, edge, kv_end, batch, head, first, kv_first, shape, steps, bias,
    limits, packed,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load a tile of queries of one head, and compute its masked scores with keys as the rows."""
    q_idx = first + tl.arange(0, BLOCK_M)
    here = q_idx < shape.q_len
    q = tile_of(query, batch, head, first, shape.q_len, HEAD_DIM, BLOCK_M)
    x = scores(keys, q.T, q_idx[None, :], kv_idx[:, None], batch, head, shape, steps, bias, UPCAST)
    of_query = documents_of(limits, batch, head, q_idx + limits.shift, here)
    x = seen_scores(
        x, edge, q_idx[None, :], kv_idx[:, None], of_query[None, :], of_key[:, None], here[None, :],
        kv_end, batch, head, shape, limits, packed, kv_first, BLOCK_N,
    )  # fmt: skip
    return q, x
