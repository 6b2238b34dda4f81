"""Statistics of complete rows, from tiles of scores that are read while they lie in the cache."""

from collections.abc import Iterator, Sequence
from functools import cache, cached_property, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from regard.backends.cpu import kernels
from regard.backends.cpu.fused_gradient import (
    BlockGradient,
    Part,
    Picks,
    with_divergence_gradients,
    with_gradients,
    with_product_gradients,
)
from regard.backends.cpu.saved_rows import SavedDivergence, SavedRows
from regard.backends.sweep import MIN_ROWS
from regard.masks import Mask
from regard.reductions.block import RowStatistics, partial_boxes
from regard.reductions.divergences import Divergence, JensenShannon
from regard.reductions.masked_product import operand_part, operand_width
from regard.reductions.needs import Needs
from regard.reductions.products import intersect
from regard.reductions.sums import SumsOfRows
from regard.scores.box import Box, Cut, Index
from regard.scores.grouped_heads import grouped_matmul
from regard.scores.score_source import MASKED_SCORE, Scores, lowest_score
from regard.scores.scratch import Scratch

_GROUP = 32  # the maximum number of columns in a group; each group has one maximum
_LEAST_GROUP = 4
_MOST_VIEWS = 256
_WIDEST = 4  # times ``Workspace.tile`` columns, at most, in a tile of few rows
_NEAR = np.float32(MASKED_SCORE)
_LOWEST = -1e300  # in place of -inf, because -inf - -inf is NaN


class NotFiniteError(Exception):
    """A score, a sink or a product is NaN or infinite, or keys cannot be counted in one pass."""


class Workspace:
    """Memory of one thread, which all of its blocks reuse.

    Attributes:
        rows: the maximum number of rows of one head that are computed at once.
        tile: the maximum number of columns in a tile; a tile of few rows has more.
        kept: the maximum number of scores of complete rows to keep for the sums over rows.
    """

    def __init__(self, rows: int, tile: int, kept: int) -> None:
        self.rows, self.tile, self.kept = rows, tile, kept
        self._scratches: dict[tuple[str, int], Scratch] = {}
        self._views: dict[tuple[str, int, int, int], tuple[Tensor, Any]] = {}

    @cached_property
    def spare(self) -> "Workspace":
        """Memory for a second block that exists at the same time."""
        return Workspace(self.rows, self.tile, self.kept)

    def scratch(self, name: str, number: int) -> Scratch:
        """Return the memory of this name for the tile with this number in its rows."""
        return self._scratches.setdefault((name, number), Scratch(0))

    def take(self, name: str, number: int, height: int, width: int) -> tuple[Tensor, Any]:
        """Return memory of this name and size, (height, width), as a tensor and as an array."""
        key = (name, number, height, width)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > _MOST_VIEWS:
                self._views.clear()
            size, device = (height, width), torch.device("cpu")
            tensor = self.scratch(name, number).take("", size, torch.float32, device)
            found = self._views[key] = tensor, tensor.numpy()
        return found


class _Place(NamedTuple):
    """The place of a tile in the matrix.

    Attributes:
        rows: its rows.
        columns: its columns.
        has_hidden: whether the mask may hide a key in it.
    """

    rows: slice
    columns: slice
    has_hidden: bool


class _Tile(NamedTuple):
    """A tile whose weights are needed once its rows are complete.

    Attributes:
        first: its first column, counted from that of the block.
        weights: exp(score - reference), (rows, columns).
        references: the largest score of each row up to this tile, (rows,).
    """

    first: int
    weights: Any
    references: Any


_NOTHING = Needs()


@final
class FusedBlock(RowStatistics):
    """Statistics of complete rows, in one pass of compiled code over each tile of their scores.

    The block is cut into ranges of rows, and these into tiles. A block with gradients reads its
    statistics from saved rows, and computes its scores again in ``backward``, tile by tile.
    """

    def __init__(
        self,
        source: Scores,
        mask: Mask | None,
        box: Box,
        cut: Cut,
        needs: Needs,
        workspace: Workspace,
        saved: SavedRows | None = None,
    ) -> None:
        """Compute all statistics that ``needs`` names.

        Args:
            source: the scores.
            mask: which keys a query may attend to.
            box: the rows, and all columns that they may attend to.
            cut: returns a part of an input, as a leaf if gradients are enabled.
            needs: the statistics that the reductions will read.
            workspace: memory of the calling thread.
            saved: the rows that the forward pass writes and a block with gradients reads. In such a
                block the sums over rows are 0; their gradients need no value.

        Raises:
            NotFiniteError: a number is NaN or infinite; ``Block`` has rules for such numbers.
        """
        graded = torch.is_grad_enabled()
        for each in needs.divergences:  # all matrices have the same columns
            box = box._replace(columns=each.columns(box))
        self.shape, self.box, self._cut = source.shape, box, cut
        self._source, self._mask = source, mask
        self._needs, self._workspace = needs, workspace
        self._size = box.size[:-1]
        self._heads = prod(self._size[:-1])
        self._start(self._heads * self._size[-1])
        sink = source.sink(box, cut)
        self._sink = sink
        self._sinks = np.zeros(0) if sink is None else sink.detach().double().reshape(-1).numpy()
        factors = self._cut_rows()
        if graded:
            assert saved is not None
            self._rows, self._keys, self._largest, diagonals = saved.read(box.at_rows)
            self._on_diagonals = [*diagonals.T.reshape(-1, self._heads, self._size[-1])]
        else:
            for rows in self._row_ranges:
                self._add_rows(rows)
        self._check()
        if saved is not None and not graded:
            diagonals = np.array(self._on_diagonals, np.float32).reshape(-1, len(self._rows)).T
            saved.write(box.at_rows, self._rows, self._keys, self._largest, diagonals)
        kernels.finish_rows(self._rows, self._sinks, self._norms)
        self.maximum = self._of_rows(self._rows[:, kernels.MAXIMUM, None])
        self._top_scores, self._top_columns = kernels.scores_and_columns(self._largest)
        self._answers = self._answer_tensors()
        self._divergences = [
            self._diverge(each, None if saved is None else saved.others[number])
            for number, each in enumerate(needs.divergences)
        ]
        if graded:
            gradient = BlockGradient(self._parts, box, self._norms, self._places, self._picks())
            if factors is None and any(tensor.requires_grad for tensor in source.tensors):
                self._answers = with_gradients(self._answers, gradient, sink)
            elif factors is not None:
                self._answers = with_product_gradients(self._answers, gradient, *factors)

    def _start(self, height: int) -> None:
        """Create the numbers that the pass adds to, for this many rows of all heads."""
        columns = self.box.columns.stop - self.box.columns.start
        self._rows = np.zeros((height, 3))
        self._rows[:, kernels.MAXIMUM] = -np.inf
        self._norms = np.empty((height, 6))
        self._keys = np.zeros((height, 2))
        self._keys[:, 1] = np.inf
        self._largest = np.full((height, self._needs.k), kernels.NO_KEY)
        self._edges = _edges(self._needs.sums, self.box.rows, self.shape)
        self._places = _places(self._edges, self._heads, self._size[-1])
        parts = self._heads * max(0, len(self._edges) - 1)
        self._sums = np.zeros((parts, columns))
        self._line = np.empty(self._sums.shape[1], np.float32)
        size = (self._heads, self._size[-1])
        self._on_diagonals = [np.full(size, -np.inf, np.float32) for _ in self._needs.offsets]
        self._products = [_zeros(height, operand_width(each)) for each in self._needs.values]
        self._transposed = [
            _zeros(*self._size[:-1], columns, operand_width(each)) for each in self._needs.operands
        ]
        self._tile_weights = [
            np.zeros(
                (height, len(range(columns)[intersect(each, self.box.columns)[1]])), np.float32
            )
            for each in self._needs.tiles
        ]

    def part(self, tensor: Tensor, index: Index) -> Tensor:
        """Return tensor[index] in float32."""
        return self._cut(tensor, index).float()

    # The pass over the tiles.

    def _cut_rows(self) -> tuple[Tensor, Tensor] | None:
        """Cut the rows into ranges; return the tensors whose product is the scores, if any."""
        rows = self.box.rows
        step = self._workspace.rows if self._heads == 1 else self._size[-1]
        self._width = self._workspace.tile
        if self._heads == 1 and self._needs.weights:  # the scores of complete rows are kept
            step = min(step, max(MIN_ROWS, self._workspace.kept // max(1, len(self._line))))
            # A product of few rows takes longer for each score, unless it has more columns. Half
            # of what rows and columns may be together is then used, which stays in the cache.
            self._width *= min(max(self._workspace.rows // (2 * step), 1), _WIDEST)
        factors = self._source.factors(self.box, self._cut)
        self._query = self._key = None
        if factors is not None:
            self._query, self._key = (self._of_one_head(each.detach()) for each in factors)
        self._operands: dict[tuple[int, int], tuple[Tensor | None, list[Tensor]]] = {}
        starts = range(rows.start, rows.stop, step)
        self._row_ranges = [slice(start, min(start + step, rows.stop)) for start in starts]
        return factors

    def _parts(self, *, graded: bool = False) -> Iterator[Part]:
        """Yield the scores of the block, tile by tile; ``graded`` scores have gradients."""
        for rows in self._row_ranges:
            at = self._rows_at(rows)
            for tile in self._tiles_of(rows):
                yield self._part_at(at, tile, graded=graded)

    def _part_at(self, at: slice, tile: _Place, *, graded: bool) -> Part:
        """Return the scores of a tile; memory for one tile serves all of them."""
        if not graded:
            return Part(at, tile.columns, self._masked(tile)[1])
        box = self.box._replace(rows=tile.rows, columns=tile.columns)
        with torch.enable_grad():
            scores = self._source.block(box, self._cut)
        height, width = self._heads * scores.shape[-2], scores.shape[-1]
        copy, raw = self._workspace.take("scores", 0, height, width)
        copy.view(scores.shape).copy_(scores.detach())
        if tile.has_hidden:
            self._hide(copy.view(scores.shape), raw, box)
        return Part(at, tile.columns, raw, scores)

    def _of_one_head(self, tensor: Tensor) -> Tensor:
        """Drop the leading axes of a tensor if the block has one head, for less overhead."""
        return tensor[(0,) * (tensor.ndim - 2)] if self._heads == 1 else tensor

    def _add_rows(self, rows: slice) -> None:
        """Compute the requested statistics of some rows, tile by tile."""
        at = self._rows_at(rows)
        rows_here, largest = self._rows[at], self._largest[at]
        by, shrunk = self._workspace.take("shrunk", 0, len(rows_here), 1)
        totals = [product[at] for product in self._products]
        kept: list[_Tile] = []
        for tile in self._tiles_of(rows):
            scores, numbers = self._masked(tile, len(kept))
            if self._on_diagonals:
                self._read_diagonals(self._shaped(scores), rows, tile.columns)
            self._count_keys(numbers, at)
            here = rows_here, shrunk[:, 0], tile.columns.start, largest
            kernels.add_tile(numbers, numbers[:0], self._peaks(numbers), *here)
            values = self._operands_of(tile.columns)[1]
            for total, value in zip(totals, values, strict=True):
                self._multiply(scores, value, by, total)
            if self._needs.weights:
                references = rows_here[:, kernels.MAXIMUM].copy()
                kept.append(_Tile(tile.columns.start - self.box.columns.start, numbers, references))
        if kept:
            self._read_weights(kept, at, rows)

    def _rows_at(self, rows: slice) -> slice:
        """Return the place of some rows among all rows of the block."""
        if self._heads > 1:  # these are all rows
            return slice(0, len(self._rows))
        return slice(rows.start - self.box.rows.start, rows.stop - self.box.rows.start)

    def _tiles_of(self, rows: slice) -> Iterator[_Place]:
        """Yield the tiles of some rows that these may attend to."""
        columns = every = self.box.columns
        if self._mask is not None:
            columns, every = self._mask.key_bounds(self.box.leading, rows, self.shape)
            if columns.start >= columns.stop:
                return
        for tile in _tiles(columns, self.box.columns, self._width):
            yield _Place(rows, tile, tile.start < every.start or tile.stop > every.stop)

    def _masked(self, tile: _Place, kept: int = 0) -> tuple[Tensor, Any]:
        """Return the masked scores of a tile as a tensor and as an array, (all rows, columns).

        Args:
            tile: its place.
            kept: the number of tiles whose memory is still needed.
        """
        box = self.box._replace(rows=tile.rows, columns=tile.columns)
        key, _ = self._operands_of(tile.columns)
        height = self._heads * (tile.rows.stop - tile.rows.start)
        width = tile.columns.stop - tile.columns.start
        if self._query is None or key is None:
            memory = self._workspace.scratch("scores", kept)
            scores = self._source.block(box, self._cut, memory).view(height, width)
            numbers: Any = scores.numpy()
        else:
            first, stop = (end - self.box.rows.start for end in (tile.rows.start, tile.rows.stop))
            query = self._query[..., first:stop, :]
            scores, numbers = self._workspace.take("scores", kept, height, width)
            if self._heads == 1:
                torch.mm(query, key, out=scores)
            else:
                grouped_matmul(query, key, self._shaped(scores))
        if tile.has_hidden:
            self._hide(self._shaped(scores), numbers, box)
        return scores, numbers

    def _diverge(self, of: Divergence, saved: SavedDivergence | None) -> Tensor:
        """Return the divergence of each row, (..., rows), from the same row of another matrix."""
        workspace, rows = self._workspace.spare, None if saved is None else saved.rows
        other = FusedBlock(of.source, of.mask, self.box, self._cut, _NOTHING, workspace, rows)
        graded = torch.is_grad_enabled()
        if saved is not None and graded:
            totals = saved.totals[self.box.at_rows].reshape(-1)
        else:
            totals = np.zeros(len(self._rows))
            add = kernels.relative_entropy
            if isinstance(of, JensenShannon):
                add = kernels.jensen_shannon
            for own, beside in self._pairs(other):
                at = own.rows
                add(own.raw, beside.raw, self._norms[at], other._norms[at], totals[at])
        if saved is not None and not graded:
            saved.totals[self.box.at_rows] = totals.reshape(self._size)
        with torch.no_grad():
            total = self._of_rows(totals[:, None]).squeeze(-1)
            numbers = of.combine(self, other, total)
        if not graded:
            return numbers
        norms, sinks = (self._norms, other._norms), (self._sink, other._sink)
        return with_divergence_gradients(of, numbers, partial(self._pairs, other), norms, sinks)

    def _pairs(self, other: "FusedBlock", *, graded: bool = False) -> Iterator[tuple[Part, Part]]:
        """Yield the scores of each tile, and those of another matrix."""
        for rows in self._row_ranges:
            both = [tile.columns for each in (self, other) for tile in each._tiles_of(rows)]
            if not both:
                continue
            columns = slice(min(each.start for each in both), max(each.stop for each in both))
            for tile in _tiles(columns, self.box.columns, self._width):
                own, beside = (
                    each._part_at(
                        self._rows_at(rows),
                        _Place(rows, tile, has_hidden=each._mask is not None),
                        graded=graded,
                    )
                    for each in (self, other)
                )
                yield own, beside

    def _count_keys(self, scores: Any, at: slice) -> None:
        if self._needs.keys:
            rows, counts = self._rows[at], self._keys[at]
            kernels.count_keys(scores, self._peaks(scores), rows, _NEAR, counts)

    def _peaks(self, scores: Any) -> Any:
        """Return memory for the maxima of groups in each row of a tile."""
        groups = _groups(scores.shape[1], self._needs.k)
        return self._workspace.take("peaks", 0, 1, groups)[1][0]

    def _shaped(self, scores: Tensor) -> Tensor:
        return scores.view(*self._size[:-1], -1, scores.shape[-1])

    def _multiply(self, weights: Tensor, value: Tensor, shrunk: Tensor, total: Tensor) -> None:
        """Add the product of a tile and a value to the sum over the earlier tiles."""
        total.mul_(shrunk)
        if self._heads == 1:
            total.addmm_(weights, value)
        else:
            total.add_(grouped_matmul(self._shaped(weights), value).view(total.shape))

    def _operands_of(self, tile: slice) -> tuple[Tensor | None, list[Tensor]]:
        """Return the key and each value at the columns of a tile; all rows share them."""
        place = tile.start, tile.stop
        if place not in self._operands:
            first = self.box.columns.start
            key = self._key
            if key is not None:
                key = key[..., tile.start - first : tile.stop - first]
            values = [
                self._of_one_head(operand_part(self, value, tile)) for value in self._needs.values
            ]
            self._operands[place] = key, values
        return self._operands[place]

    def _hide(self, scores: Tensor, numbers: Any, box: Box) -> None:
        """Write -inf where the mask hides a key, to scores that are a tensor and an array."""
        mask = self._mask
        assert mask is not None
        limits = mask.limits(self.shape)
        if limits is not None and limits.is_band:
            rows, first = box.rows.stop - box.rows.start, (box.rows.start, box.columns.start)
            q_len, kv_len = self.shape[-2:]
            low = -q_len if limits.low is None else limits.low
            high = kv_len if limits.high is None else limits.high
            kernels.hide_outside(numbers, rows, *first, low, high)
            return
        for edge in partial_boxes(mask, box, self.shape):
            start = edge.columns.start - box.columns.start
            some = slice(start, start + edge.columns.stop - edge.columns.start)
            hidden = ~mask.block(edge, self.shape, scores.device)
            scores[..., some].masked_fill_(hidden, -torch.inf)

    def _read_diagonals(self, scores: Tensor, rows: slice, columns: slice) -> None:
        """Copy the scores of a tile that lie on the requested diagonals."""
        for offset, found in zip(self._needs.offsets, self._on_diagonals, strict=True):
            values = scores.diagonal(offset + rows.start - columns.start, dim1=-2, dim2=-1)
            row = max(rows.start, columns.start - offset) - self.box.rows.start
            length = values.shape[-1]
            if length:
                found[:, row : row + length] = values.reshape(len(found), length).numpy()

    def _read_weights(self, tiles: Sequence[_Tile], at: slice, rows: slice) -> None:
        """Compute the statistics that need the weights of complete rows."""
        if not np.isfinite(self._rows[at, kernels.MOMENT]).all():
            raise NotFiniteError
        norms, places = self._norms[at], self._places[at]
        sinks = self._sinks[at] if len(self._sinks) else self._sinks
        kernels.finish_rows(self._rows[at], sinks, norms)
        for first, weights, references in tiles:
            if self._needs.sums:
                to = self._sums, self._line
                kernels.sum_columns(weights, references, norms, places, first, *to)
            if self._transposed or self._tile_weights:
                shifted = (
                    np.maximum(references, _LOWEST)
                    - norms[:, kernels.REFERENCE]
                    - norms[:, kernels.NORMALIZER]
                )
                factors = np.exp(shifted).astype(np.float32)[:, None]
                self._multiply_transposed(weights, factors, first, rows)
                self._read_tiles(weights, factors, first, at)

    def _multiply_transposed(self, weights: Any, factors: Any, first: int, rows: slice) -> None:
        by = self._shaped(torch.from_numpy(factors))
        tile = self._shaped(torch.from_numpy(weights))
        for operand, total in zip(self._needs.operands, self._transposed, strict=True):
            # The heads of an operand may be grouped, so the factors multiply the weights.
            part = operand_part(self, operand, rows)
            some = total[..., first : first + tile.shape[-1], :]
            some.add_(grouped_matmul((tile * by).mT, part))

    def _read_tiles(self, weights: Any, factors: Any, first: int, at: slice) -> None:
        start = self.box.columns.start + first
        tile = slice(start, start + weights.shape[1])
        for columns, stored in zip(self._needs.tiles, self._tile_weights, strict=True):
            in_wanted, in_tile = intersect(columns, tile)
            before = intersect(columns, self.box.columns)[0].start
            to = slice(in_wanted.start - before, in_wanted.stop - before)
            if in_wanted.start < in_wanted.stop:
                stored[at, to] = weights[:, in_tile] * factors

    def _check(self) -> None:
        finite = np.isfinite(self._rows[:, kernels.MOMENT]).all()
        finite = finite and np.isfinite(self._keys[:, 0]).all()
        finite = finite and (self._sinks < np.inf).all()  # NaN is not less, either
        products = (*self._products, *self._transposed)
        if not (finite and all(bool(each.sum().isfinite()) for each in products)):
            raise NotFiniteError

    # The answers.

    def _answer_tensors(self) -> list[Tensor]:
        """Return all statistics with gradients, in the order that ``with_gradients`` expects."""
        norms = self._norms
        normalizer = norms[:, [kernels.NORMALIZER]]
        normalizer[np.isposinf(normalizer)] = 0.0
        single = (kernels.LOGSUMEXP, kernels.MEAN, kernels.ROW_SUM)
        sums = torch.from_numpy(self._sums).float()
        return [
            self._of_rows(normalizer).squeeze(-1),
            *(self._of_rows(norms[:, [each]]).squeeze(-1) for each in single),
            self._of_rows(self._weights(self._top_scores, norms[:, None])),
            sums.view(*self._size[:-1], -1, sums.shape[-1]),
            *map(self._diagonal, self._on_diagonals, self._needs.offsets),
        ]

    def _of_rows(self, numbers: Any) -> Tensor:
        return torch.from_numpy(numbers).float().view(*self._size, numbers.shape[-1])

    def _weights(self, scores: Any, norms: Any) -> Any:
        shifted = scores - norms[..., kernels.REFERENCE]
        return np.exp(shifted - norms[..., kernels.NORMALIZER])

    @property
    def _norms_by_head(self) -> Any:
        return self._norms.reshape(self._heads, self._size[-1], -1)

    def _diagonal(self, scores: Any, offset: int) -> Tensor:
        weights = self._weights(scores, self._norms_by_head)[:, self._rows_on(offset)]
        return torch.from_numpy(weights).float().view(*self._size[:-1], -1)

    def _rows_on(self, offset: int) -> slice:
        """Return the rows of the block in which a diagonal crosses a column of the block."""
        rows, columns = self.box.rows, self.box.columns
        first = max(0, columns.start - offset - rows.start)
        return slice(first, max(first, min(self._size[-1], columns.stop - offset - rows.start)))

    def _picks(self) -> Picks:
        """Return the positions of single weights with gradients: the largest and the diagonals."""
        rows = cast(Any, np.arange(self._size[-1]))
        columns = [self._top_columns]
        weights = [self._weights(self._top_scores, self._norms[:, None])]
        for offset, scores in zip(self._needs.offsets, self._on_diagonals, strict=True):
            on = np.full((self._heads, self._size[-1]), -1)
            some = self._rows_on(offset)
            on[:, some] = rows[some] + self.box.rows.start + offset
            columns.append(on.reshape(-1, 1))
            weights.append(self._weights(scores, self._norms_by_head).reshape(-1, 1))
        diagonals = [self._rows_on(offset) for offset in self._needs.offsets]
        return Picks(np.concatenate(columns, 1), np.concatenate(weights, 1), diagonals)

    @property
    def largest_score(self) -> Tensor:
        return self.maximum.squeeze(-1)  # blocks with gradients of it are plain ones

    @property
    def log_normalizer(self) -> Tensor:
        return self._answers[0]

    @property
    def logsumexp(self) -> Tensor:
        return self._answers[1]

    @property
    def mean_shifted(self) -> Tensor:
        return self._answers[2]

    @property
    def row_sum(self) -> Tensor:
        return self._answers[3]

    @property
    def visible_keys(self) -> Tensor:
        return self._of_rows(self._keys[:, [0]]).squeeze(-1)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        shifted = self._top_scores[:, :k] - self._norms[:, [kernels.REFERENCE]]
        masked = shifted <= lowest_score(torch.float32)
        keys = torch.from_numpy(np.where(masked, -1, self._top_columns[:, :k]))
        return self._answers[4][..., :k], keys.view(*self._size, k)

    def sum_rows(self, parts: Sequence[slice]) -> Tensor:
        sums, edges = self._answers[5], self._edges
        if edges == [parts[0].start, *(part.stop for part in parts)]:
            return sums
        spans = [slice(edges.index(part.start), edges.index(part.stop)) for part in parts]
        return torch.stack([sums[..., span, :].sum(-2) for span in spans], -2)

    def diagonal(self, offset: int) -> Tensor:
        return self._answers[6 + self._needs.offsets.index(offset)]

    def product(self, value: Tensor) -> Tensor:
        number = next(n for n, each in enumerate(self._needs.values) if each is value)
        inverse = self._of_rows(np.exp(-self._norms[:, [kernels.NORMALIZER]]))
        return self._products[number].view(*self._size, -1) * inverse

    def transposed_product(self, operand: Tensor) -> Tensor:
        return next(
            found
            for each, found in zip(self._needs.operands, self._transposed, strict=True)
            if each is operand
        )

    def tile(self, rows: slice, columns: slice) -> Tensor:
        width = len(range(self.box.columns.stop - self.box.columns.start)[columns])
        for each, stored in zip(self._needs.tiles, self._tile_weights, strict=True):
            if intersect(each, self.box.columns)[1] == columns:
                values = torch.from_numpy(stored).view(*self._size, width)
                return values[..., rows, :]
        raise KeyError(columns)

    def divergence(self, of: object) -> Tensor | None:
        pairs = zip(self._needs.divergences, self._divergences, strict=True)
        return next((found for each, found in pairs if each is of), None)


def _zeros(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device="cpu")


def _tiles(columns: slice, of_block: slice, width: int) -> list[slice]:
    """Cut columns into tiles of about equal width.

    The cuts are at the same places for all rows of a block.
    """
    whole = of_block.stop - of_block.start
    width = -(-whole // -(-whole // width))
    edges = range(of_block.start, of_block.stop, width)
    inner = [edge for edge in edges if columns.start < edge < columns.stop]
    return [slice(start, stop) for start, stop in pairwise([columns.start, *inner, columns.stop])]


def _edges(sums: Sequence[SumsOfRows], rows: slice, shape: torch.Size) -> list[int]:
    """Return where the parts of all sums start and stop, in rising order."""
    parts = [part for each in sums for part in each.parts(rows, shape)]
    return sorted({edge for part in parts for edge in (part.start, part.stop)})


def _places(edges: list[int], heads: int, rows: int) -> Any:
    """Return the sum that each row of each head belongs to, (all rows,); -1 for none."""
    places = np.full(rows, -1)
    for place, (start, stop) in enumerate(pairwise(edges)):
        places[start:stop] = place
    of_head = np.arange(heads)[:, None] * max(0, len(edges) - 1)
    return np.where(places < 0, -1, of_head + places).reshape(-1)


@cache
def _groups(width: int, k: int) -> int:
    """Return how many groups to cut a row into to find its maximum and its k largest scores."""
    size = _GROUP
    while size > _LEAST_GROUP and width < 4 * k * size:
        size //= 2
    return max(1, width // size)
