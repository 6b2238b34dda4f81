"""One head as a picture at every scale, from reductions of strips of its rows.

Level z has one cell for each block of 2^z x 2^z tokens. One pass over the head leaves behind two
numbers of each row, which turn its scores into weights, and the sums of the weights in the cells of
the level called *base*. From there upwards a tile is added up from these sums; below, it is
computed from query and key. Until the pass is through it may be answered from a sample.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.analysis.span_shares import shares_of_rest
from regard.errors import RegardError
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.without_keys import without_keys
from regard.reductions.products import WeightTile, scores_at
from regard.reductions.sums import Segments
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import accumulation_dtype
from regard.view.tiles.layer_survey import reduced
from regard.view.tiles.protocol import TileAnswer
from regard.view.tiles.row_normalizers import RowNormalizers

TILE = 256
AT_ONCE = 2**25  # scores that take a sixth of a second on one core
STRIP_SCORES = 2**26  # of the rows between which a pass can end, or let others go first
_FIRST_BASE = 5
_MOST_CELLS = 2**24
_WINDOW_SCORES = 2**22
_SAMPLED_AT_ONCE = 16  # rows
# The product of one row or one column uses another BLAS kernel, which rounds differently. With at
# least 32 of each, rows, columns and tiles get the same scores, on the processors that were tried.
_LEAST = 32
_AGREEING = 64.0  # scores up to here, rounded in another order, change a weight by 1e-5 of it

Pause = Callable[[], None]
Spans = Sequence[tuple[int, int]]


class WrongQuestionError(RegardError):
    """A question for what is not there; its first line is the sentence."""


@dataclass(frozen=True)
class Place:
    """The position of a tile.

    Attributes:
        level: a cell is a block of 2^level x 2^level tokens, counted from token 0.
        row: tiles of 256 x 256 cells, counted from the top.
        column: counted from the left.
    """

    level: int
    row: int
    column: int

    def rows(self, q_len: int) -> range:
        """Return the queries of the tile."""
        return self._tokens(self.row, q_len)

    def columns(self, kv_len: int) -> range:
        """Return the keys of the tile."""
        return self._tokens(self.column, kv_len)

    def _tokens(self, tile: int, tokens: int) -> range:
        side = TILE << self.level
        return range(min(tokens, tile * side), min(tokens, (tile + 1) * side))


def highest_level(shape: Sequence[int]) -> int:
    """Return the level at which one tile holds a whole matrix, (q_len, kv_len)."""
    return (-(-max(shape) // TILE) - 1).bit_length()


def check_place(place: Place, shape: Sequence[int]) -> None:
    """Raise an error if a matrix, (q_len, kv_len), has no such tile.

    Raises:
        WrongQuestionError: it has none.
    """
    checked("level", place.level, highest_level(shape) + 1)
    for name, tile, tokens in zip(("row", "column"), (place.row, place.column), shape, strict=True):
        checked(name, tile, -(-tokens // (TILE << place.level)))


def checked(name: str, value: int, count: int) -> int:
    """Return a position, counted from 0, if it exists.

    Raises:
        WrongQuestionError: there is none.
    """
    if not 0 <= value < count:
        raise WrongQuestionError(f"{name} is {value}; it must be from 0 to {count - 1}.")
    return value


class HeadTiles:
    """The numbers of one head that were computed so far.

    Query and key are copied, in the dtype in which scores are computed: it is done once, and a file
    that changes afterwards does no harm.

    Args:
        matrix: (q_len, kv_len).
        aside: keys that count as masked; what is left of each row is made to sum to 1.

    Attributes:
        matrix: without the keys that are set aside.
        base: the finest level of which sums are kept.
        seconds: that the pass has taken so far.
    """

    def __init__(self, matrix: AttentionMatrix, aside: tuple[int, ...] = ()) -> None:
        source, dtype = matrix.source, accumulation_dtype(matrix.dtype)
        if isinstance(source, QueryKeyScores):
            query, key = (each.to(dtype, copy=True) for each in (source.query, source.key))
            source = replace(source, query=query, key=key)
        self.matrix = without_keys(AttentionMatrix(source, matrix.mask), aside)
        self.base = _FIRST_BASE
        while self._cell_count() > _MOST_CELLS:
            self.base += 1
        self.seconds = 0.0
        self._aside = aside
        self._alone = threading.Lock()
        q_len = matrix.shape[0]
        self._scores = self._scores_in(range(q_len))
        self._scores_done = self._rows_done = 0
        self._known = torch.zeros(q_len, dtype=torch.bool, device="cpu")
        # The maximum of each row, and its log-normalizer, (q_len, 2).
        self._normalizers = torch.zeros(q_len, 2, dtype=dtype, device=matrix.device)
        self._cells: Tensor | None = None  # the sums at the base, (rows, columns)

    @property
    def shape(self) -> torch.Size:
        """(q_len, kv_len)."""
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        """The memory that it takes, or will take once the pass is through."""
        copied = sum(tensor.nbytes for tensor in self.matrix.source.tensors)
        return copied + 4 * self._cell_count() + self._normalizers.nbytes

    @property
    def done(self) -> float:
        """The finished part of the pass, from 0 to 1."""
        return 1.0 if self.is_done else self._scores_done / max(1, self._scores)

    @property
    def is_done(self) -> bool:
        """Return True if the pass is finished, so that every tile is exact."""
        return self._rows_done == self.shape[0]

    @property
    def is_small(self) -> bool:
        """Return True if the whole pass takes a moment only."""
        return self._scores <= AT_ONCE

    def advance(self, pause: Pause) -> None:
        """Add the next strip of rows, if one is left.

        Args:
            pause: called before each strip; what it raises ends the work.
        """
        pause()
        with self._alone:
            if self.is_done:
                return
            start, cell = monotonic(), 1 << self.base
            height = max(cell, STRIP_SCORES // self.shape[1] // cell * cell)
            rows = range(self._rows_done, min(self._rows_done + height, self.shape[0]))
            down, across = _spans(rows, cell), _spans(range(self.shape[1]), cell)
            statistics, sums = RowNormalizers(rows), Segments(down, across)
            normalizers, means = self._reduced(statistics, sums)
            if self._cells is None:
                size = (-(-tokens // cell) for tokens in self.shape)
                self._cells = torch.zeros(*size, device=means.device)
            self._keep(rows, normalizers)
            first = rows.start // cell
            self._cells[first : first + len(down)] = means * _sizes(down).to(means)[:, None]
            self._scores_done += self._scores_in(rows)
            self._rows_done = rows.stop
            self.seconds += monotonic() - start

    def finish(self, pause: Pause) -> None:
        """Run the rest of the pass."""
        while not self.is_done:
            self.advance(pause)

    def row(self, query: int, pause: Pause) -> Tensor:
        """Return the weights of one query, (kv_len,)."""
        rows = range(query, query + 1)
        self._learn(rows, pause)
        return self._windows(rows, range(self.shape[1]), 1, pause)[0][0].float()

    def column(self, key: int, pause: Pause) -> Tensor:
        """Return the weights that all queries give to one key, (q_len,)."""
        rows = range(self.shape[0])
        self._learn(rows, pause)
        return torch.cat(self._windows(rows, range(key, key + 1), 1, pause))[:, 0].float()

    def allowed(self, query: int) -> Tensor:
        """To which keys a query may attend, (kv_len,); to none that is set aside."""
        return self._scores_at(range(query, query + 1), range(self.shape[1]))[0] != -torch.inf

    def tile(self, place: Place, pause: Pause) -> TileAnswer:
        """Return a tile: exact if that is fast, or else from a sample.

        Args:
            place: which.
            pause: as in ``advance``.
        """
        rows, columns = place.rows(self.shape[0]), place.columns(self.shape[1])
        cell = 1 << place.level
        keys = _keys_of(self.matrix, rows)
        if max(keys.start, columns.start) >= min(keys.stop, columns.stop):
            cells = (len(_spans(part, cell)) for part in (rows, columns))
            return _tile(torch.zeros(*cells, device="cpu"))
        if place.level >= self.base:
            if self.is_small:
                self.finish(pause)
            if rows.stop <= self._rows_done:
                return _tile(self._added_up(rows, columns, place.level))
        elif place.level == 0 or self._scores_in(self._unknown(rows)) <= AT_ONCE:
            self._learn(rows, pause)
            sums = [
                _cell_sums(_cell_sums(weights, cell, -1), cell, -2)
                for weights in self._windows(rows, columns, cell, pause)
            ]
            return _tile(_means(torch.cat(sums), rows, columns, cell))
        return self._sample(rows, columns, cell, pause)

    def shares(self, queries: Spans, keys: Spans, pause: Pause) -> Tensor:
        """Return the share of each key part in each query part, (query parts, key parts).

        Args:
            queries: of each part its first token, and the one past the last; no two overlap.
            keys: the same.
            pause: as in ``advance``.
        """
        spans = [*keys, (0, self.matrix.shape[-1])] if self._aside else keys
        [answer] = reduced(self.matrix, [Segments(queries, spans)], lambda _: pause())
        return (shares_of_rest(answer) if self._aside else answer).float().cpu()

    def _added_up(self, rows: range, columns: range, level: int) -> Tensor:
        """Return the means of cells, from the sums at the base."""
        assert self._cells is not None
        down, across = (
            slice(part.start >> self.base, -(-part.stop >> self.base)) for part in (rows, columns)
        )
        more = 1 << (level - self.base)
        sums = _cell_sums(_cell_sums(self._cells[down, across], more, -1), more, -2)
        return _means(sums, rows, columns, 1 << level)

    def _sample(self, rows: range, columns: range, cell: int, pause: Pause) -> TileAnswer:
        """Return a tile from the query in the middle of each cell."""
        *starts, last = range(rows.start, rows.stop, cell)
        middles = [range(start + cell // 2, last, cell) for start in starts[:1]]
        middle = (last + min(last + cell, rows.stop)) // 2  # of a cell that may be shorter
        sums = [
            _cell_sums(weights[:, columns.start : columns.stop], cell, -1)
            for queries in (*middles, range(middle, middle + 1))
            for weights in weights_of_rows(self.matrix, queries, pause)
        ]
        values = torch.cat(sums).float() / _sizes(_spans(columns, cell)).to(sums[0].device)
        return _tile(values, cell)

    def _windows(self, rows: range, columns: range, cell: int, pause: Pause) -> list[Tensor]:
        """Return the weights in strips of rows whose normalizers are known, whole cells each."""
        height = max(1, _WINDOW_SCORES // len(columns) // cell) * cell
        found: list[Tensor] = []
        for first in range(rows.start, rows.stop, height):
            pause()
            part = range(first, min(first + height, rows.stop))
            scores = self._scores_at(part, columns)
            masked = scores == -torch.inf
            maximum, log_normalizer = self._normalizers[part.start : part.stop].unbind(-1)
            scores -= maximum[:, None]
            # Another matrix product may round a score to a little above the maximum: by 1e29 for
            # scores of 1e36, whose exponential is infinite.
            weights = scores.clamp_(max=0).sub_(log_normalizer[:, None]).exp_()
            found.append(weights.masked_fill_(masked, 0))
        return found

    def _scores_at(self, rows: range, columns: range) -> Tensor:
        wide = [
            _widened(part, length) for part, length in zip((rows, columns), self.shape, strict=True)
        ]
        scores = scores_at(self.matrix.source, self.matrix.mask, *wide)
        first_row, first_column = rows.start - wide[0].start, columns.start - wide[1].start
        return scores[first_row : first_row + len(rows), first_column : first_column + len(columns)]

    def _unknown(self, rows: range) -> range:
        """Return the rows from the first to the last whose normalizers are not known."""
        unknown = (~self._known[rows.start : rows.stop]).nonzero()
        if not len(unknown):
            return range(rows.start, rows.start)
        return range(rows.start + int(unknown[0]), rows.start + int(unknown[-1]) + 1)

    def _learn(self, rows: range, pause: Pause) -> None:
        """Compute the normalizers of those of these rows of which they are not known."""
        unknown, height = self._unknown(rows), max(1, STRIP_SCORES // self.shape[1])
        for first in range(unknown.start, unknown.stop, height):
            pause()
            part = _widened(range(first, min(first + height, unknown.stop)), self.shape[0])
            self._keep(part, *self._reduced(RowNormalizers(part)))

    def _reduced(self, statistics: RowNormalizers, *sums: Segments) -> tuple[Tensor, ...]:
        """Return the normalizers of rows, and sums, by the fastest backend whose scores agree.

        Compiled kernels add the products of a score in another order than ``_scores_at``. The
        weights of large scores would differ by that, so the sweep computes these rows.
        """
        given = (statistics, *sums)
        for backend in (None, "sweep"):
            answers = self.matrix.reduce(*given, backend=backend)
            answers = answers if sums else (answers,)
            maxima = answers[0][:, 0]
            if bool(((maxima.abs() <= _AGREEING) | (maxima == -torch.inf)).all()):
                break
        return answers

    def _keep(self, rows: range, normalizers: Tensor) -> None:
        self._normalizers[rows.start : rows.stop] = normalizers
        self._known[rows.start : rows.stop] = True

    def _scores_in(self, rows: range) -> int:
        """Return how many scores complete rows need."""
        parts = [range(start, stop) for start, stop in _spans(rows, TILE)]
        keys = [_keys_of(self.matrix, part) for part in parts]
        return sum(
            len(part) * (each.stop - each.start) for part, each in zip(parts, keys, strict=True)
        )

    def _cell_count(self) -> int:
        q_len, kv_len = self.shape
        return -(-q_len >> self.base) * -(-kv_len >> self.base)


def _tile(values: Tensor, sampled: int | None = None) -> TileAnswer:
    height, width = values.shape
    exact = sampled is None
    return TileAnswer(values=values, height=height, width=width, exact=exact, sampled=sampled)


def weights_of_rows(matrix: AttentionMatrix, rows: range, pause: Pause) -> Iterator[Tensor]:
    """Yield the weights of queries of a head that are far apart, 16 at a time, (rows, kv_len)."""
    for first in range(0, len(rows), _SAMPLED_AT_ONCE):
        pause()
        few = rows[first : first + _SAMPLED_AT_ONCE]
        # Starting the compiled kernels takes longer than these rows.
        yield matrix.reduce(WeightTile(few, range(matrix.shape[1])), backend="sweep")


def _keys_of(matrix: AttentionMatrix, rows: range) -> slice:
    """Return a range of keys that holds all keys of these rows."""
    if matrix.mask is None:
        return slice(0, matrix.shape[1])
    return matrix.mask.key_bounds((), slice(rows.start, rows.stop), matrix.shape).any


def _spans(tokens: range, cell: int) -> list[tuple[int, int]]:
    """Cut a range of tokens that begins with a cell into cells."""
    return [
        (start, min(start + cell, tokens.stop)) for start in range(tokens.start, tokens.stop, cell)
    ]


def _widened(part: range, tokens: int) -> range:
    """Return at least 32 tokens around these, where there are so many."""
    start = max(0, min(part.start, tokens - _LEAST))
    return range(start, min(tokens, max(part.stop, start + _LEAST)))


def _sizes(spans: Spans) -> Tensor:
    return torch.tensor([stop - start for start, stop in spans], device="cpu")


def _cell_sums(values: Tensor, size: int, axis: int) -> Tensor:
    """Add up neighbours along an axis, -1 or -2, so many each; fewer at the end."""
    if size == 1:
        return values
    missing = -values.shape[axis] % size
    values = pad(values, (0, 0) * (-1 - axis) + (0, missing)) if missing else values
    return cast(Tensor, values.unflatten(axis, (-1, size))).sum(axis)


def _means(sums: Tensor, rows: range, columns: range, cell: int) -> Tensor:
    down, across = (_sizes(_spans(part, cell)).to(sums.device) for part in (rows, columns))
    return sums.float() / (down[:, None] * across)
