"""One head as a picture at every scale: sums of weights in cells, computed once, row by row.

Level z has one cell for each block of 2^z x 2^z tokens. From the level called *base* upwards a tile
is added up from sums that one pass over the head leaves behind; below it, it is computed from query
and key as soon as the normalizers of its rows are known. Until then it is answered from a sample.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar, cast

import torch
from torch import Tensor

from regard.backends.parallel import map_in_order, one_thread
from regard.masks.mask import length, overlap
from regard.scores.scratch import Scratch
from regard.view.tiles.strips import (
    PART,
    HeadScores,
    Neighbours,
    Normalizers,
    Pause,
    Picked,
    Strip,
    Sums,
    sums,
    window,
)

__all__ = ["Place", "Pyramid", "Spans", "Tile", "check_place", "checked", "highest_level"]

TILE = 256
AT_ONCE = 2**25  # so many scores nobody waits for: a sixth of a second on one core
_FIRST_BASE = 5
_MOST_CELLS = 2**24
_STRIP_ROWS = 1024
_ROWS = 256  # enough for a matrix product to run at speed
_FEW_ROWS = 128  # a tile's rows, on two threads
_MANY_ROWS = 4096  # of a few keys

Item = TypeVar("Item")
Answer = TypeVar("Answer")
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
        self._scores = _scores_in(head, slice(0, head.shape[0]))
        self._scores_done = 0
        self._rows_done = 0
        self._known = torch.zeros(head.shape[0], dtype=torch.bool, device="cpu")
        zeros = torch.zeros(2, head.shape[0], dtype=head.dtype, device=head.source.device)
        self._normalizers = Normalizers(*zeros)
        self._cells: Tensor | None = None  # (2, rows, columns): as they are, and by row

    @property
    def nbytes(self) -> int:
        """The memory that it takes, or will take once the pass is through."""
        return self.head.nbytes + 8 * self._cell_count() + 2 * self._normalizers.maximum.nbytes

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
            pause: called every few milliseconds; what it raises ends the work, and what is done by
                then is kept.
        """
        with self._alone:
            start = monotonic()
            rows = slice(self._rows_done, min(self._rows_done + _STRIP_ROWS, self.head.shape[0]))
            try:
                self._sweep([Neighbours(self.head, part) for part in _parts(rows)], pause, True)
            finally:
                self.seconds += monotonic() - start

    def finish(self, pause: Pause) -> None:
        """Run the rest of the pass."""
        while not self.is_done:
            self.advance(pause)

    def row(self, query: int, pause: Pause) -> Tensor:
        """Return the weights of one query, (kv_len,)."""
        row, kv_len = Neighbours(self.head, slice(query, query + 1)), self.head.shape[1]
        with one_thread():
            return sums(row, 1, Scratch(kv_len), pause).each_key(kv_len)[0].float()

    def column(self, key: int, pause: Pause) -> Tensor:
        """Return the weights that all queries give to one key, (q_len,)."""
        rows, columns = slice(0, self.head.shape[0]), slice(key, key + 1)
        self._learn(rows, pause)
        return self._window(self._strips(rows, columns), columns, 1, False, pause)[:, 0]

    def allowed(self, query: int) -> Tensor:
        """To which keys a query may attend, (kv_len,); to none that is set aside."""
        kv_len = self.head.shape[1]
        row = Neighbours(self.head, slice(query, query + 1))
        scores = row.scores(slice(0, kv_len), Scratch(kv_len))
        return scores[0] != -torch.inf

    def tile(self, place: Place, pause: Pause) -> Tile:
        """Return a tile: exact if that is fast, or else from a sample.

        Args:
            place: which.
            pause: as in ``advance``.
        """
        q_len, kv_len = self.head.shape
        rows, columns = place.rows(q_len), place.columns(kv_len)
        if not length(overlap(columns, self.head.columns(rows))):
            cells = (len(_starts(part, 1 << place.level)) for part in (rows, columns))
            return Tile(torch.zeros(*cells, device="cpu"), True)
        if place.level >= self.base:
            if self.is_small:
                self.finish(pause)
            if rows.stop <= self._rows_done:
                with one_thread():
                    return Tile(self._added_up(place, rows, columns), True)
        elif self._unknown_scores(rows) <= AT_ONCE:
            return Tile(self._computed(place, rows, columns, pause), True)
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
        down, across = (
            [self._cut(start, stop, tokens) for start, stop in parts]
            for parts, tokens in zip((queries, keys), self.head.shape, strict=True)
        )
        sums = [self._cells[0, cells].sum(0, dtype=torch.float64) for cells, _ in down]
        drawn = torch.stack(sums)  # (query parts, cells)
        self._add_rows(drawn, [ends for _, ends in down], pause)
        shares = torch.stack([drawn[:, cells].sum(-1) for cells, _ in across], -1)
        self._add_columns(shares, queries, [ends for _, ends in across], pause)
        sizes = torch.tensor([self._count(slice(*part)) for part in queries], device="cpu")
        return (shares / sizes[:, None].to(shares)).float()

    def _add_rows(self, drawn: Tensor, ends: Sequence[list[slice]], pause: Pause) -> None:
        """Add the rows at the ends of each query part, for each cell of keys."""
        everything = slice(0, self.head.shape[1])

        def work(rows: tuple[int, slice], scratch: Scratch) -> tuple[int, Tensor]:
            strip = Neighbours(self.head, rows[1])
            known = self._normalizers.at(strip.rows)
            return rows[0], window(strip, everything, 1 << self.base, known, scratch, pause).sum(0)

        def take(answer: tuple[int, Tensor]) -> None:
            drawn[answer[0]] += answer[1]

        _each(_placed(ends), work, take, drawn.device)

    def _add_columns(
        self, shares: Tensor, queries: Spans, ends: Sequence[list[slice]], pause: Pause
    ) -> None:
        """Add all rows of each query part, for the ends of the key parts."""
        keys = _placed(ends)
        rows = slice(min(queries)[0], max(queries)[1])
        part_of = torch.full((rows.stop,), len(queries), device=shares.device)
        for place, (start, stop) in enumerate(queries):
            part_of[start:stop] = place
        drawn = shares.new_zeros(len(queries) + 1, len(keys))

        def work(part: slice, scratch: Scratch) -> tuple[slice, Tensor]:
            strip = Neighbours(self.head, part)
            known = self._normalizers.at(part)
            each = [window(strip, key, length(key), known, scratch, pause) for _, key in keys]
            return part, torch.cat(each, -1)

        def take(answer: tuple[slice, Tensor]) -> None:
            drawn.index_add_(0, part_of[answer[0]], answer[1].double())

        if keys:
            _each(_parts(rows, _MANY_ROWS), work, take, shares.device)
            places = torch.tensor([place for place, _ in keys], device=shares.device)
            shares.index_add_(1, places, drawn[:-1])

    def _cut(self, start: int, stop: int, tokens: int) -> tuple[slice, list[slice]]:
        """Return the cells that lie in a part completely, and the tokens before and after them."""
        first, last = _cells_of(start, self.base), stop >> self.base
        if stop == tokens:
            last = _cells_of(stop, self.base)
        if first >= last:
            return slice(0, 0), [slice(start, stop)]
        ends = slice(start, first << self.base), slice(min(last << self.base, stop), stop)
        return slice(first, last), [end for end in ends if length(end)]

    def _count(self, rows: slice) -> int:
        """Over how many rows a mean is; where keys are set aside, those that have others."""
        if not len(self.head.aside):
            return length(rows)
        return max(1, int((~self._normalizers.at(rows).is_empty).sum()))

    def _added_up(self, place: Place, rows: slice, columns: slice) -> Tensor:
        """From the sums at the base."""
        assert self._cells is not None
        at = (slice(s.start >> self.base, _cells_of(s.stop, self.base)) for s in (rows, columns))
        cells = self._cells[(int(place.by_row), *at)]
        more = 1 << (place.level - self.base)
        return _added(_added(cells, more, 0), more, 1) / _counts(rows, columns, 1 << place.level)

    def _computed(self, place: Place, rows: slice, columns: slice, pause: Pause) -> Tensor:
        """From query and key."""
        self._learn(rows, pause)
        cell = 1 << place.level
        strips = self._strips(rows, columns)
        by_query = self._window(strips, columns, cell, place.by_row, pause)
        with one_thread():
            return _added(by_query, cell, 0) / _counts(rows, columns, cell)

    def _sample(self, place: Place, rows: slice, columns: slice, pause: Pause) -> Tile:
        """From the query in the middle of each cell."""
        cell = 1 << place.level
        starts = _starts(rows, cell)
        middles = [(start + min(start + cell, rows.stop)) // 2 for start in starts]
        halves = (middles[: TILE // 2], middles[TILE // 2 :])
        strips = [Picked(self.head, tuple(half)) for half in halves if half]
        self._sweep([strip for strip in strips if not self._knows(strip.at)], pause)
        by_query = self._window(strips, columns, cell, place.by_row, pause)
        exact = cell == 1
        means = by_query / _counts(slice(0, len(middles)), columns, cell, tall=1)
        return Tile(means, exact, None if exact else cell)

    def _strips(self, rows: slice, columns: slice) -> list[Neighbours]:
        """For a window; a small one is quicker than a thread starts."""
        small = length(rows) * length(columns) <= PART
        return [
            Neighbours(self.head, part) for part in ([rows] if small else _parts(rows, _FEW_ROWS))
        ]

    def _knows(self, at: slice | list[int]) -> bool:
        return bool(self._known[at].all())

    def _learn(self, rows: slice, pause: Pause) -> None:
        """Compute the normalizers of those of these rows of which they are not known."""
        unknown = [part for part in _parts(rows, _FEW_ROWS) if not self._knows(part)]
        self._sweep([Neighbours(self.head, part) for part in unknown], pause)

    def _unknown_scores(self, rows: slice) -> int:
        unknown = (part for part in _parts(rows, _FEW_ROWS) if not self._knows(part))
        return sum(_scores_in(self.head, part) for part in unknown)

    def _sweep(self, strips: Sequence[Strip], pause: Pause, keep: bool = False) -> None:
        """Compute the normalizers of complete rows.

        With ``keep`` their cells are added too; the strips then begin at the next row of the pass.
        """
        cell = 1 << self.base if keep else None

        def work(strip: Strip, scratch: Scratch) -> tuple[Strip, Sums]:
            return strip, sums(strip, cell, scratch, pause)

        def take(answer: tuple[Strip, Sums]) -> None:
            strip, found = answer
            self._normalizers.maximum[strip.at] = found.normalizers.maximum
            self._normalizers.log_normalizer[strip.at] = found.normalizers.log_normalizer
            self._known[strip.at] = True
            if keep:
                self._keep(strip.height, found)

        _each(strips, work, take, self.head.source.device)

    def _keep(self, height: int, found: Sums) -> None:
        """Add the sums of the next rows; one row of cells may need several strips."""
        if self._cells is None:
            size = (_cells_of(n, self.base) for n in self.head.shape)
            self._cells = torch.zeros(2, *size, device=found.cells.device)
        rows = slice(self._rows_done, self._rows_done + height)
        down = slice(rows.start >> self.base, _cells_of(rows.stop, self.base))
        across = slice(found.first, found.first + found.cells.shape[-1])
        by_row = found.cells / _or_one(found.normalizers.highest)
        for place, cells in enumerate((found.cells, by_row)):
            by_block = _added(cells, 1 << self.base, 0)
            self._cells[place, down, across].add_(by_block)
        self._scores_done += _scores_in(self.head, rows)
        self._rows_done = rows.stop

    def _window(
        self, strips: Sequence[Strip], columns: slice, cell: int, by_row: bool, pause: Pause
    ) -> Tensor:
        """Sum over the keys of each cell, in rows whose normalizers are known: (rows, cells)."""
        found: list[Tensor] = []

        def work(strip: Strip, scratch: Scratch) -> Tensor:
            known = self._normalizers.at(strip.at)
            cells = window(strip, columns, cell, known, scratch, pause)
            return cells.div_(_or_one(known.highest)) if by_row else cells

        _each(strips, work, found.append, self.head.source.device)
        with one_thread():
            return torch.cat(found).float()

    def _cell_count(self) -> int:
        q_len, kv_len = self.head.shape
        return _cells_of(q_len, self.base) * _cells_of(kv_len, self.base)


def _scores_in(head: HeadScores, rows: slice) -> int:
    """Return how many scores complete rows need."""
    return sum(length(part) * length(head.columns(part)) for part in _parts(rows))


def _parts(rows: slice, height: int = _ROWS) -> list[slice]:
    return [slice(start, min(start + height, rows.stop)) for start in _starts(rows, height)]


def _placed(parts: Sequence[Sequence[slice]]) -> list[tuple[int, slice]]:
    """Each slice with the place of those that it is among."""
    return [(place, part) for place, some in enumerate(parts) for part in some]


def _each(
    items: Sequence[Item],
    work: Callable[[Item, Scratch], Answer],
    take: Callable[[Answer], None],
    device: torch.device,
) -> None:
    """Each item's answer, in order; several are worked on at once."""

    def worker() -> Callable[[Item], Answer]:
        scratch = Scratch(PART)
        return lambda item: work(item, scratch)

    if len(items) > 1:
        map_in_order(items, worker, take, threaded=device.type == "cpu")
        return
    with one_thread():
        for item in items:
            take(worker()(item))


def _starts(part: slice, cell: int) -> range:
    return range(part.start, part.stop, cell)


def _cells_of(tokens: int, level: int) -> int:
    return -(-tokens >> level)


def _or_one(highest: Tensor) -> Tensor:
    """Return the divisor of each row of weights, (rows, 1): 1 where all its weights are 0."""
    return torch.where(highest > 0, highest, 1)[:, None]


def _added(values: Tensor, cell: int, axis: int) -> Tensor:
    """Add each `cell` neighbours along an axis; the last group may be smaller."""
    whole = values.shape[axis] // cell * cell
    cells = cast(Tensor, values.narrow(axis, 0, whole).unflatten(axis, (-1, cell))).sum(axis + 1)
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
