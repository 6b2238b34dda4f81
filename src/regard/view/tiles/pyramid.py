"""One head as a picture at every scale: sums of weights in cells, computed once, row by row.

Level z has one cell for each block of 2^z x 2^z tokens. From the level called *base* upwards a tile
is added up from sums that one pass over the head leaves behind; below it, it is computed from query
and key as soon as the normalizers of its rows are known. Until then it is answered from a sample.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import log
from time import monotonic
from typing import NamedTuple, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.parallel import map_in_order, one_thread
from regard.masks import Mask
from regard.masks.mask import NO_KEYS, KeyBounds, Points, hull, length, overlap
from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.block import partial_boxes
from regard.scores.box import Box, cut_whole
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores, accumulation_dtype
from regard.scores.scratch import Scratch

__all__ = [
    "HeadScores",
    "Pause",
    "Place",
    "Pyramid",
    "Spans",
    "Tile",
    "check_place",
    "checked",
    "highest_level",
]

TILE = 256
AT_ONCE = 2**25  # so many scores nobody waits for: a sixth of a second on one core
PART = 2**19  # scores of a part of a window: 2 MiB in float32
_FIRST_BASE = 5
_MOST_CELLS = 2**24
_STRIP_ROWS = 1024
_ROWS = 256  # enough for a matrix product to run at speed
_FEW_ROWS = 128  # a tile's rows, on two threads
_LN2 = log(2)
# The product of one row or one column uses another BLAS kernel, which rounds differently. With at
# least 32 of each, rows, columns and tiles get the same scores, on the processors that were tried.
_LEAST = 32

Pause = Callable[[], None]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Place:
    """The position of a tile.

    Attributes:
        level: a cell is a block of 2^level x 2^level tokens, counted from token 0.
        row: tiles of 256 x 256 cells, counted from the top.
        column: counted from the left.
        by_row: whether the weights of each row are divided by its highest first.
    """

    level: int
    row: int
    column: int
    by_row: bool = False

    def rows(self, q_len: int) -> slice:
        """Return the queries of the tile."""
        return self._tokens(self.row, q_len)

    def columns(self, kv_len: int) -> slice:
        """Return the keys of the tile."""
        return self._tokens(self.column, kv_len)

    def _tokens(self, tile: int, tokens: int) -> slice:
        side = TILE << self.level
        return slice(min(tokens, tile * side), min(tokens, (tile + 1) * side))


@dataclass(frozen=True, eq=False)
class Tile:
    """A part of a head as a picture.

    Attributes:
        values: the mean weight of each cell, (rows, columns), float32.
        exact: whether they are; else they come from a sample, and it pays to ask again.
        sampled: where it is a sample: one query in so many was looked at.
    """

    values: Tensor
    exact: bool
    sampled: int | None = None


def highest_level(shape: Sequence[int]) -> int:
    """Return the level at which one tile holds a whole matrix, (q_len, kv_len)."""
    return (-(-max(shape) // TILE) - 1).bit_length()


def check_place(place: Place, shape: Sequence[int]) -> None:
    """Raise an error if a matrix, (q_len, kv_len), has no such tile.

    Raises:
        IndexError: it has none.
    """
    checked("level", place.level, highest_level(shape) + 1)
    for name, tile, tokens in zip(("row", "column"), (place.row, place.column), shape, strict=True):
        checked(name, tile, -(-tokens // (TILE << place.level)))


def checked(name: str, value: int, count: int) -> int:
    """Return a position, counted from 0, if it exists.

    Raises:
        IndexError: there is none.
    """
    if not 0 <= value < count:
        raise IndexError(f"{name} is {value}; it must be from 0 to {count - 1}.")
    return value


@dataclass(frozen=True, eq=False)
class HeadScores:
    """The scores of one head.

    Attributes:
        source: (q_len, kv_len).
        mask: of that shape; None: every key is allowed.
        sink: the logit in the denominator that belongs to no key, (1,); None without one.
        aside: keys that count as masked; what is left of each row is made to sum to 1.
    """

    source: Scores
    mask: Mask | None
    sink: Tensor | None
    aside: Tensor

    @property
    def threaded(self) -> bool:
        """True if several parts may be computed at once."""
        safe = self.source.runs_on_threads and (self.mask is None or self.mask.runs_on_threads)
        return safe and self.source.device.type == "cpu"

    @classmethod
    def of(cls, matrix: AttentionMatrix, aside: Sequence[int] = ()) -> "HeadScores":
        """Return the scores of a matrix, (q_len, kv_len).

        Query and key are copied, in the dtype in which scores are computed: it is done once, and a
        file that changes afterwards does no harm.
        """
        source = matrix.source
        if isinstance(source, QueryKeyScores):
            dtype = accumulation_dtype(source.dtype)
            query, key = (each.to(dtype, copy=True) for each in (source.query, source.key))
            source = replace(source, query=query, key=key)
        sink = None if aside else source.sink(Box((), slice(0, 1), slice(0, 1)), cut_whole)
        keys = torch.tensor(aside, dtype=torch.long, device=matrix.device)
        return cls(source, matrix.mask, None if sink is None else sink.flatten(), keys)

    @property
    def shape(self) -> torch.Size:
        """(q_len, kv_len)."""
        return self.source.shape

    def keys_of(self, rows: slice) -> slice:
        """Return a range of keys that holds all keys of these rows."""
        if self.mask is None:
            return slice(0, self.shape[1])
        return self.mask.key_bounds((), rows, self.shape).any

    def window(self, rows: slice, columns: slice, scratch: Scratch | None = None) -> Tensor:
        """Return the scores in a window, (rows, columns); -inf at masked keys."""
        wide_rows, inner_rows = _widened(rows, self.shape[0])
        wide_columns, inner_columns = _widened(columns, self.shape[1])
        box = Box((), wide_rows, wide_columns)
        scores = self.source.block(box, cut_whole, scratch)[inner_rows, inner_columns]
        if self.mask is not None:
            for edge in partial_boxes(self.mask, Box((), rows, columns), self.shape):
                hidden = ~self.mask.block(edge, self.shape, scores.device)
                scores[:, _moved(edge.columns, -columns.start)].masked_fill_(hidden, -torch.inf)
        inside = self.aside[(self.aside >= columns.start) & (self.aside < columns.stop)]
        return scores.index_fill_(1, inside - columns.start, -torch.inf) if len(inside) else scores

    def picked(self, places: list[int]) -> "HeadScores":
        """Return the scores of the rows at some places, which may be far apart."""
        match self.source:
            case QueryKeyScores(position_bias=None, score_mod=None, bias=bias) as source:
                if bias is not None and bias.shape[0] != 1:
                    bias = bias[places]
                few: Scores = replace(source, query=source.query[places], bias=bias)
            case GivenScores() as source:
                few = replace(source, values=source.values[places])
            case source:  # a score depends on where it stands
                keys = slice(0, self.shape[1])
                boxes = (Box((), slice(row, row + 1), keys) for row in places)
                few = GivenScores(torch.cat([source.block(box, cut_whole) for box in boxes]))
        mask = self.mask
        if mask is not None:
            rows = (slice(place, place + 1) for place in places)
            bounds = tuple(mask.key_bounds((), row, self.shape) for row in rows)
            mask = _PickedRows(mask, self.shape, tuple(places), bounds)
        return HeadScores(few, mask, self.sink, self.aside)


class Pyramid:
    """The numbers of one head that were computed so far.

    Attributes:
        head: whose scores they are.
        base: the finest level of which sums are kept.
        seconds: that the pass has taken so far.
    """

    def __init__(self, head: HeadScores) -> None:
        self.head = head
        self.base = _FIRST_BASE
        while self._cell_count() > _MOST_CELLS:
            self.base += 1
        self.seconds = 0.0
        self._alone = threading.Lock()
        q_len = head.shape[0]
        self._scores = self._scores_in(slice(0, q_len))
        self._scores_done = 0
        self._rows_done = 0
        self._known = torch.zeros(q_len, dtype=torch.bool, device="cpu")
        dtype = accumulation_dtype(head.source.dtype)
        # (2, q_len): the maximum of each row, and the log of its sum of exp(score - maximum). They
        # stay apart: in their sum a large maximum would round the other away.
        self._normalizers = torch.zeros(2, q_len, dtype=dtype, device=head.source.device)
        self._cells: Tensor | None = None  # (2, rows, columns): as they are, and by row

    @property
    def nbytes(self) -> int:
        """The memory that it takes, or will take once the pass is through."""
        source = self.head.source
        copied = (source.query, source.key) if isinstance(source, QueryKeyScores) else ()
        return (
            sum(each.nbytes for each in copied) + 8 * self._cell_count() + self._normalizers.nbytes
        )

    @property
    def done(self) -> float:
        """The finished part of the pass, from 0 to 1."""
        return 1.0 if self.is_done else self._scores_done / max(1, self._scores)

    @property
    def is_done(self) -> bool:
        """Return True if the pass is finished, so that every tile is exact."""
        return self._rows_done == self.head.shape[0]

    @property
    def is_small(self) -> bool:
        """Return True if the whole pass takes a moment only."""
        return self._scores <= AT_ONCE

    def advance(self, pause: Pause) -> None:
        """Add the next strip of rows, if one is left.

        Args:
            pause: called every few milliseconds; what it raises ends the work.
        """
        with self._alone:
            start = monotonic()
            rows = slice(self._rows_done, min(self._rows_done + _STRIP_ROWS, self.head.shape[0]))
            try:
                if length(rows):
                    self._add_strip(rows, pause)
            finally:
                self.seconds += monotonic() - start

    def finish(self, pause: Pause) -> None:
        """Run the rest of the pass."""
        while not self.is_done:
            self.advance(pause)

    def row(self, query: int, pause: Pause) -> Tensor:
        """Return the weights of one query, (kv_len,)."""
        rows = slice(query, query + 1)
        pause()
        self._learn(rows, pause)
        with one_thread():
            return self._weights(rows, slice(0, self.head.shape[1]))[0].float()

    def column(self, key: int, pause: Pause) -> Tensor:
        """Return the weights that all queries give to one key, (q_len,)."""
        rows, columns = slice(0, self.head.shape[0]), slice(key, key + 1)
        self._learn(rows, pause)
        return _summed(self.head, self._normalizers, rows, columns, 1, False, pause)[:, 0].float()

    def allowed(self, query: int) -> Tensor:
        """To which keys a query may attend, (kv_len,); to none that is set aside."""
        rows = slice(query, query + 1)
        return self.head.window(rows, slice(0, self.head.shape[1]))[0] != -torch.inf

    def tile(self, place: Place, pause: Pause) -> Tile:
        """Return a tile: exact if that is fast, or else from a sample.

        Args:
            place: which.
            pause: as in ``advance``.
        """
        q_len, kv_len = self.head.shape
        rows, columns = place.rows(q_len), place.columns(kv_len)
        if not length(overlap(columns, self.head.keys_of(rows))):
            cells = (len(_starts(part, 1 << place.level)) for part in (rows, columns))
            return Tile(torch.zeros(*cells, device="cpu"), True)
        if place.level >= self.base:
            if self.is_small:
                self.finish(pause)
            if rows.stop <= self._rows_done:
                return Tile(self._added_up(place, rows, columns), True)
        elif self._scores_in(self._unknown(rows)) <= AT_ONCE:
            self._learn(rows, pause)
            cell = 1 << place.level
            by_query = _summed(
                self.head, self._normalizers, rows, columns, cell, place.by_row, pause
            ).float()
            return Tile(_by_cell(by_query, rows, cell, -2) / _counts(rows, columns, cell), True)
        return self._sample(place, rows, columns, pause)

    def shares(self, queries: Spans, keys: Spans, pause: Pause) -> Tensor:
        """Return the share of each key part in each query part, (query parts, key parts).

        Of each part the cells that lie in it whole are added up from the sums at the base, and what
        is left at its ends is computed. The pass must be through.

        Args:
            queries: of each part its first token, and the one past the last; no two overlap.
            keys: the same.
            pause: as in ``advance``.
        """
        assert self._cells is not None
        q_len, kv_len = self.head.shape
        down = [self._cut(start, stop, q_len) for start, stop in queries]
        across = [self._cut(start, stop, kv_len) for start, stop in keys]
        drawn = torch.stack([self._cells[0, part.cells].double().sum(0) for part in down])
        shares = torch.stack([drawn[:, part.cells].sum(-1) for part in across], -1)
        for part, share in zip(down, shares, strict=True):
            for rows in part.ends:
                pause()
                known = self.head.keys_of(rows)  # no other key has a weight
                received = self._weights(rows, known).sum(0, dtype=torch.float64)
                received = pad(received, (known.start, kv_len - known.stop))
                share += torch.stack([received[start:stop].sum() for start, stop in keys])
        every, cell = slice(0, q_len), 1 << self.base
        for place, part in enumerate(across):
            for columns in part.ends:
                each = _summed(self.head, self._normalizers, every, columns, cell, False, pause)
                received = each.sum(-1, dtype=torch.float64)
                shares[:, place] += torch.stack([received[some.inner].sum() for some in down])
        sizes = [self._count(slice(*part)) for part in queries]
        return (shares / torch.tensor(sizes, device=shares.device)[:, None]).float()

    def _cut(self, start: int, stop: int, tokens: int) -> "_Cut":
        first, last = _cells_of(start, self.base), stop >> self.base
        if stop == tokens:
            last = _cells_of(stop, self.base)
        if first >= last:
            return _Cut(slice(0, 0), slice(0, 0), [slice(start, stop)])
        inner = slice(first << self.base, min(last << self.base, stop))
        ends = slice(start, inner.start), slice(inner.stop, stop)
        return _Cut(slice(first, last), inner, [end for end in ends if length(end)])

    def _count(self, rows: slice) -> int:
        """Over how many rows a mean is; where keys are set aside, those that have others."""
        if not len(self.head.aside):
            return length(rows)
        return max(1, int((self._normalizers[0, rows] != -torch.inf).sum()))

    def _added_up(self, place: Place, rows: slice, columns: slice) -> Tensor:
        """From the sums at the base."""
        assert self._cells is not None
        down, across = (
            slice(part.start >> self.base, _cells_of(part.stop, self.base))
            for part in (rows, columns)
        )
        more = 1 << (place.level - self.base)
        cells = _by_cell(self._cells[int(place.by_row), down, across], across, more, -1)
        return _by_cell(cells, down, more, -2) / _counts(rows, columns, 1 << place.level)

    def _sample(self, place: Place, rows: slice, columns: slice, pause: Pause) -> Tile:
        """From the query in the middle of each cell."""
        cell = 1 << place.level
        middles = [(start + min(start + cell, rows.stop)) // 2 for start in _starts(rows, cell)]
        some = self.head.picked(middles)
        if not bool(self._known[middles].all()):
            for found in _each_sum(some, _parts(slice(0, len(middles)), TILE // 2), None, pause):
                self._keep(middles[found.rows], found.normalizers)
        normalizers, every = self._normalizers[:, middles], slice(0, len(middles))
        sums = _summed(some, normalizers, every, columns, cell, place.by_row, pause).float()
        exact = cell == 1
        means = sums / _counts(every, columns, cell, tall=1)
        return Tile(means, exact, None if exact else cell)

    def _weights(self, rows: slice, columns: slice) -> Tensor:
        """Return the weights in a window, in rows whose normalizers are known."""
        return _weights_of(self.head, rows, columns, self._normalizers[:, rows])

    def _unknown(self, rows: slice) -> slice:
        """Return the rows from the first to the last whose normalizers are not known."""
        unknown = (~self._known[rows]).nonzero()
        if not len(unknown):
            return slice(rows.start, rows.start)
        return slice(rows.start + int(unknown[0]), rows.start + int(unknown[-1]) + 1)

    def _learn(self, rows: slice, pause: Pause) -> None:
        """Compute the normalizers of those of these rows of which they are not known."""
        unknown = self._unknown(rows)
        for found in _each_sum(self.head, _parts(unknown, _FEW_ROWS), None, pause):
            self._keep(found.rows, found.normalizers)

    def _keep(self, rows: slice | list[int], normalizers: Tensor) -> None:
        self._normalizers[:, rows] = normalizers
        self._known[rows] = True

    def _add_strip(self, rows: slice, pause: Pause) -> None:
        """Add the sums of the next rows; one row of cells may need several strips."""
        cell = 1 << self.base
        if self._cells is None:
            size = (_cells_of(n, self.base) for n in self.head.shape)
            self._cells = torch.zeros(2, *size, device=self.head.source.device)
        for found in _each_sum(self.head, _parts(rows, _ROWS), cell, pause):
            self._keep(found.rows, found.normalizers)
            down = slice(found.rows.start >> self.base, _cells_of(found.rows.stop, self.base))
            across = slice(found.first, found.first + found.cells.shape[-1])
            by_row = found.cells / _or_one(_highest(found.normalizers))
            for place, cells in enumerate((found.cells, by_row)):
                self._cells[place, down, across] += _by_cell(cells, found.rows, cell, -2)
        self._scores_done += self._scores_in(rows)
        self._rows_done = rows.stop

    def _scores_in(self, rows: slice) -> int:
        """Return how many scores complete rows need."""
        return sum(length(part) * length(self.head.keys_of(part)) for part in _parts(rows, TILE))

    def _cell_count(self) -> int:
        q_len, kv_len = self.head.shape
        return _cells_of(q_len, self.base) * _cells_of(kv_len, self.base)


class _Cut(NamedTuple):
    """A part of a text, cut at the edges of cells.

    Attributes:
        cells: those that lie in it completely.
        inner: their tokens.
        ends: its other tokens.
    """

    cells: slice
    inner: slice
    ends: list[slice]


class _Sums(NamedTuple):
    """The results of one pass over some rows.

    Attributes:
        rows: which.
        normalizers: (2, rows), as in ``Pyramid``.
        first: the first cell that is not 0 for certain.
        cells: the sum of the weights of each row in each cell from there on, (rows, cells).
    """

    rows: slice
    normalizers: Tensor
    first: int
    cells: Tensor


def _sums(head: HeadScores, rows: slice, cell: int | None, scratch: Scratch, pause: Pause) -> _Sums:
    """Return the weights of complete rows, summed up in cells of neighbouring keys.

    A part of the keys is small enough for a core's cache. Its exponentials are relative to its own
    largest score, and are scaled once all parts are known: one pass gives exact weights.

    Args:
        head: whose rows they are.
        rows: which.
        cell: keys in a cell; cells count from key 0. None: any size, for the normalizers alone.
        scratch: memory that is used again.
        pause: called before each part; an exception that it raises ends the pass.
    """
    step = max(1, PART // max(_LEAST, length(rows)))
    cell = cell or step
    step = -(-step // cell) * cell
    # Rows without keys still have an answer.
    columns = head.keys_of(rows)
    columns = columns if length(columns) else slice(0, 1)
    start = columns.start // cell * cell
    maxima: list[Tensor] = []
    powers: list[Tensor] = []
    for part in _parts(slice(start, columns.stop), step):
        pause()
        scores = head.window(rows, part, scratch)
        maxima.append(scores.amax(-1))
        scores.sub_(_finite(maxima[-1])[:, None]).mul_(1 / _LN2).exp2_()
        powers.append(_by_cell(scores, part, cell, -1))
    each_maximum = torch.stack(maxima, -1)  # (rows, parts)
    maximum = each_maximum.amax(-1)
    factors = (each_maximum - _finite(maximum)[:, None]).exp()
    totals = torch.stack([part.sum(-1) for part in powers], -1)
    log_normalizer = (totals * factors).sum(-1).log()
    if head.sink is not None:
        log_normalizer = torch.logaddexp(log_normalizer, head.sink - _finite(maximum))
    log_normalizer = log_normalizer.masked_fill(maximum == -torch.inf, 0)
    factors.mul_((-log_normalizer).exp()[:, None])
    cells = [part.mul_(one[:, None]) for part, one in zip(powers, factors.unbind(-1), strict=True)]
    return _Sums(rows, torch.stack((maximum, log_normalizer)), start // cell, torch.cat(cells, -1))


@final
@dataclass(frozen=True, eq=False, repr=False)
class _PickedRows(Mask):
    """Rows of a mask that are far apart."""

    thread_safe = True

    mask: Mask
    whole: torch.Size
    places: tuple[int, ...]
    bounds: tuple[KeyBounds, ...]

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return self

    def allows(self, points: Points) -> Tensor:
        rows, columns = cast("tuple[slice, slice]", points.places)
        keys, bounds = points.kv_idx, self.bounds[rows]
        ends = torch.tensor([(some.start, some.stop) for some, _ in bounds], device=points.device)
        allowed = (keys >= ends[:, :1]) & (keys < ends[:, 1:])
        for row, (place, (some, every)) in enumerate(zip(self.places[rows], bounds, strict=True)):
            if some != every:
                box = Box((), slice(place, place + 1), columns)
                allowed[row] = self.mask.block(box, self.whole, points.device)
        return allowed

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        return KeyBounds(reduce(hull, (some for some, _ in self.bounds[rows])), NO_KEYS)

    @property
    def text(self) -> str:
        return f"some rows of {self.mask.text}"


def _each_sum(
    head: HeadScores, parts: Sequence[slice], cell: int | None, pause: Pause
) -> list[_Sums]:
    """Return the sums of some parts of the rows; several are worked on at once."""
    found: list[_Sums] = []

    def worker() -> Callable[[slice], _Sums]:
        scratch = Scratch(PART)
        return lambda rows: _sums(head, rows, cell, scratch, pause)

    with one_thread():  # also for a single part: a short operation is quicker alone
        map_in_order(parts, worker, found.append, threaded=head.threaded)
    return found


def _weights_of(
    head: HeadScores,
    rows: slice,
    columns: slice,
    normalizers: Tensor,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return the weights in a window, (rows, columns), given the normalizers of its rows."""
    scores = head.window(rows, columns, scratch)
    maximum, log_normalizer = normalizers
    scores.sub_(_finite(maximum)[:, None])
    # A matrix product of another shape may round a score to a little above the maximum.
    # Of scores of 1e36 that little is 1e29, and its exponential infinite.
    return scores.clamp_(max=0).sub_(log_normalizer[:, None]).exp_()


def _summed(
    head: HeadScores,
    normalizers: Tensor,
    rows: slice,
    columns: slice,
    cell: int,
    by_row: bool,
    pause: Pause,
) -> Tensor:
    """Sum over the keys of each cell, in rows whose normalizers are known: (rows, cells)."""
    found: list[Tensor] = []

    def worker() -> Callable[[slice], Tensor]:
        scratch = Scratch(PART)

        def work(part: slice) -> Tensor:
            pause()
            of_rows = normalizers[:, part]
            weights = _weights_of(head, part, columns, of_rows, scratch)
            cells = _by_cell(weights, columns, cell, -1)
            return cells / _or_one(_highest(of_rows)) if by_row else cells

        return work

    parts = _parts(rows, max(_LEAST, PART // length(columns)))
    with one_thread():
        map_in_order(parts, worker, found.append, threaded=head.threaded)
        return torch.cat(found)


def _highest(normalizers: Tensor) -> Tensor:
    """Return the largest weight of each row, (rows,)."""
    maximum, log_normalizer = normalizers
    return (-log_normalizer).exp().masked_fill(maximum == -torch.inf, 0)


def _widened(part: slice, tokens: int) -> tuple[slice, slice]:
    """Return at least 32 tokens where there are so many, and where the part lies in them."""
    start = max(0, min(part.start, tokens - _LEAST))
    stop = min(tokens, max(part.stop, start + _LEAST))
    return slice(start, stop), _moved(part, -start)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _parts(rows: slice, height: int) -> list[slice]:
    return [slice(start, min(start + height, rows.stop)) for start in _starts(rows, height)]


def _starts(part: slice, cell: int) -> range:
    return range(part.start, part.stop, cell)


def _cells_of(tokens: int, level: int) -> int:
    return -(-tokens >> level)


def _or_one(highest: Tensor) -> Tensor:
    """Return the divisor of each row of weights, (rows, 1): 1 where all its weights are 0."""
    return torch.where(highest > 0, highest, 1)[:, None]


def _finite(values: Tensor) -> Tensor:
    """Return the values with 0 for -inf: a score of -inf less -inf would be NaN."""
    return values.masked_fill(values == -torch.inf, 0)


def _by_cell(values: Tensor, part: slice, size: int, axis: int) -> Tensor:
    """Add up a part of an axis, -1 or -2, in cells that count from 0, in a new tensor."""
    if part.start % size:
        values = pad(values, (0, 0) * (-1 - axis) + (part.start % size, 0))
    whole = values.shape[axis] // size * size
    cells = cast(Tensor, values.narrow(axis, 0, whole).unflatten(axis, (-1, size))).sum(axis)
    if whole == values.shape[axis]:
        return cells
    rest = values.narrow(axis, whole, values.shape[axis] - whole).sum(axis, keepdim=True)
    return torch.cat([cells, rest], axis)


def _counts(rows: slice, columns: slice, cell: int, tall: int | None = None) -> Tensor:
    """Return how many weights each cell adds."""
    sizes = ((rows, tall or cell), (columns, cell))
    down, across = (
        torch.tensor([min(size, part.stop - at) for at in _starts(part, size)], device="cpu")
        for part, size in sizes
    )
    return (down[:, None] * across).float()
