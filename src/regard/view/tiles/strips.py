"""Some rows of one head, computed a part of their keys at a time, and summed up in cells.

A part is small enough to stay in a core's cache. Its exponentials are relative to its own largest
score. Once all parts of a row are known, they are scaled to the largest score of the row and
normalised. So one pass over the scores gives exact weights, however long the row is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log

import torch
from torch import Tensor

from regard.masks import Mask
from regard.masks.mask import length, overlap
from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.block import partial_boxes
from regard.scores.box import Box, cut_whole
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores, accumulation_dtype
from regard.scores.scratch import Scratch

__all__ = [
    "PART",
    "HeadScores",
    "Neighbours",
    "Normalizers",
    "Pause",
    "Picked",
    "Strip",
    "Sums",
    "sums",
    "window",
]

_LN2 = log(2)
PART = 2**19  # scores of a part: 2 MiB in float32
# The product of one row or one column uses another BLAS kernel, which rounds differently. With at
# least 8 of each, rows, columns and tiles get the same scores, on the processors that were tried.
_LEAST = 8
Pause = Callable[[], None]


@dataclass(frozen=True, eq=False)
class HeadScores:
    """The scores of one head, sinks set aside where they are named.

    Attributes:
        source: of shape (q_len, kv_len).
        mask: of that shape; None: every key is allowed.
        aside: the keys that count as masked, rising.
    """

    source: Scores
    mask: Mask | None
    aside: Tensor

    @classmethod
    def of(cls, matrix: AttentionMatrix, aside: Sequence[int] = ()) -> "HeadScores":
        """Return the scores of a matrix of one head, (q_len, kv_len).

        Query and key are copied, in the dtype in which scores are computed: it is done once, and a
        file that changes afterwards does no harm.

        Args:
            matrix: without leading axes.
            aside: keys that are set aside; what is left of each row is made to sum to 1.
        """
        source = matrix.source
        if isinstance(source, QueryKeyScores):
            dtype = accumulation_dtype(source.dtype)
            query, key = (each.to(dtype, copy=True) for each in (source.query, source.key))
            sink = None if len(aside) else source.sink_bias
            source = replace(source, query=query, key=key, sink_bias=sink)
        places = torch.tensor(sorted(aside), dtype=torch.long, device=source.device)
        return cls(source, matrix.mask, places)

    @property
    def shape(self) -> torch.Size:
        """(q_len, kv_len)."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """In which scores are computed: float32, or float64."""
        return accumulation_dtype(self.source.dtype)

    @property
    def nbytes(self) -> int:
        """The number of bytes that only this object holds."""
        if isinstance(self.source, QueryKeyScores):
            return self.source.query.nbytes + self.source.key.nbytes
        return 0

    def columns(self, rows: slice) -> slice:
        """Return a range of keys that holds all keys of these rows."""
        if self.mask is None:
            return slice(0, self.shape[-1])
        return self.mask.key_bounds((), rows, self.shape).any


class Strip(ABC):
    """Some rows of a head.

    Attributes:
        head: whose rows they are.
    """

    head: HeadScores

    @property
    @abstractmethod
    def columns(self) -> slice:
        """Outside these keys none of the rows attends to anything."""

    @property
    @abstractmethod
    def height(self) -> int:
        """The number of rows."""

    @property
    @abstractmethod
    def at(self) -> slice | list[int]:
        """The positions in a tensor of (q_len,)."""

    @abstractmethod
    def masked(self, part: slice, scratch: Scratch) -> Tensor:
        """Return the scores at some keys, (height, keys); -inf at masked keys."""

    def sink(self) -> Tensor | None:
        """Return the sink bias, (1,), or None."""
        sink = self.head.source.sink(Box((), slice(0, 1), slice(0, 1)), cut_whole)
        return None if sink is None else sink.flatten()

    def scores(self, part: slice, scratch: Scratch) -> Tensor:
        """Return the masked scores, also -inf at hidden sinks; the caller may change them."""
        scores = self.masked(part, scratch)
        aside = self.head.aside
        inside = aside[(aside >= part.start) & (aside < part.stop)] - part.start
        return scores.index_fill_(1, inside, -torch.inf) if len(inside) else scores


@dataclass(frozen=True, eq=False)
class Neighbours(Strip):
    """Rows that follow one another.

    Attributes:
        rows: which.
    """

    head: HeadScores
    rows: slice

    @property
    def columns(self) -> slice:
        return self.head.columns(self.rows)

    @property
    def height(self) -> int:
        return length(self.rows)

    @property
    def at(self) -> slice | list[int]:
        return self.rows

    def masked(self, part: slice, scratch: Scratch) -> Tensor:
        source, mask = self.head.source, self.head.mask
        rows, inner_rows = _widened(self.rows, self.head.shape[0])
        keys, inner_keys = _widened(part, self.head.shape[1])
        scores = source.block(Box((), rows, keys), cut_whole, scratch)[inner_rows, inner_keys]
        if mask is None:
            return scores
        box = Box((), self.rows, part)
        for edge in partial_boxes(mask, box, self.head.shape):
            at = slice(edge.columns.start - part.start, edge.columns.stop - part.start)
            scores[:, at].masked_fill_(~mask.block(edge, source.shape, source.device), -torch.inf)
        return scores


@dataclass(frozen=True, eq=False)
class Picked(Strip):
    """Rows far apart.

    Attributes:
        places: of the rows.
    """

    head: HeadScores
    places: tuple[int, ...]

    @cached_property
    def _known(self) -> "tuple[Tensor, Tensor, list[slice], list[slice]]":
        """Return each row's first key, the key after its last, and the bounds from its mask."""
        kv_len, device = self.head.shape[-1], self.head.source.device
        some, every = [slice(0, kv_len)] * self.height, [slice(0, kv_len)] * self.height
        if self.head.mask is not None:
            rows = (slice(place, place + 1) for place in self.places)
            known = [self.head.mask.key_bounds((), row, self.head.shape) for row in rows]
            some, every = [each.any for each in known], [each.all for each in known]
        ends = torch.tensor([[each.start, each.stop] for each in some], device=device)
        return ends[:, :1], ends[:, 1:], some, every

    @property
    def columns(self) -> slice:
        filled = [part for part in self._known[2] if length(part)]
        if not filled:
            return slice(0, 0)
        return slice(min(part.start for part in filled), max(part.stop for part in filled))

    @property
    def height(self) -> int:
        return len(self.places)

    @property
    def at(self) -> slice | list[int]:
        return list(self.places)

    @cached_property
    def _together(self) -> Scores | None:
        """The rows as scores of their own; None where a score depends on where it stands."""
        match self.head.source:
            case QueryKeyScores(position_bias=None, score_mod=None) as source:
                bias = source.bias
                if bias is not None and bias.shape[0] != 1:
                    bias = bias[list(self.places)]
                return replace(source, query=source.query[list(self.places)], bias=bias)
            case GivenScores() as source:
                return replace(source, values=source.values[list(self.places)])
            case _:
                return None

    def masked(self, part: slice, scratch: Scratch) -> Tensor:
        if self._together is None:
            source, size = self.head.source, (self.height, length(part))
            out = scratch.take("scores", size, accumulation_dtype(source.dtype), source.device)
            for row, place in enumerate(self.places):
                box = Box((), slice(place, place + 1), part)
                out[row] = source.block(box, cut_whole)[0]
        else:
            out = self._together.block(Box((), slice(0, self.height), part), cut_whole, scratch)
        if self.head.mask is not None:
            self._hide(self.head.mask, part, out)
        return out

    def _hide(self, mask: Mask, part: slice, scores: Tensor) -> None:
        shape, device = self.head.shape, scores.device
        first, stop, some, every = self._known
        keys = torch.arange(part.start, part.stop, device=device)
        scores.masked_fill_((keys < first) | (keys >= stop), -torch.inf)
        for row, place in enumerate(self.places):
            known = overlap(some[row], part)
            if length(known) > length(overlap(every[row], known)):
                box = Box((), slice(place, place + 1), known)
                at = slice(known.start - part.start, known.stop - part.start)
                hidden = ~mask.block(box, shape, device).expand(1, length(known))
                scores[row, at].masked_fill_(hidden[0], -torch.inf)


@dataclass(frozen=True, eq=False)
class Normalizers:
    """The two numbers of each row that turn its scores into weights.

    weight = exp((score - maximum) - log_normalizer). The two stay apart: in their sum, the
    logsumexp, a large maximum would round the log_normalizer away.

    Attributes:
        maximum: the largest score of each row, (rows,); -inf where a row has no keys.
        log_normalizer: log of the sum of exp(score - maximum) of each row, (rows,), the sink's
            included; 0 where a row has no keys.

    Example:
        >>> import torch
        >>> from regard.view.tiles.strips import Normalizers
        >>> Normalizers(torch.tensor([1e9]), torch.tensor([2.0]).log()).highest
        tensor([0.5000])
    """

    maximum: Tensor
    log_normalizer: Tensor

    @property
    def highest(self) -> Tensor:
        """The largest weight of each row, (rows,)."""
        return (-self.log_normalizer).exp().masked_fill(self.is_empty, 0)

    @property
    def is_empty(self) -> Tensor:
        """True where a row has no keys, (rows,)."""
        return self.maximum == -torch.inf

    def at(self, rows: slice | list[int]) -> "Normalizers":
        """Return those of some of the rows."""
        return Normalizers(self.maximum[rows], self.log_normalizer[rows])

    def weights_(self, scores: Tensor) -> Tensor:
        """Replace the scores of all rows, (rows, keys), by their weights."""
        shifted = scores.sub_(_finite(self.maximum)[:, None])
        # A matrix product of another shape may round a score to a little above the maximum.
        # Of scores of 1e36 that little is 1e29, and its exponential infinite.
        return shifted.clamp_(max=0).sub_(self.log_normalizer[:, None]).exp_()


@dataclass(frozen=True, eq=False)
class Sums:
    """The results of one pass over some rows.

    Attributes:
        normalizers: of each row.
        first: the first cell that is not 0 for certain.
        cells: the sum of the weights of each row in each cell from there on, (height, cells).
    """

    normalizers: Normalizers
    first: int
    cells: Tensor

    def each_key(self, kv_len: int) -> Tensor:
        """Return the weight of every key, (height, kv_len), where a cell is one key."""
        after = kv_len - self.first - self.cells.shape[-1]
        return torch.nn.functional.pad(self.cells, (self.first, after))


def sums(strip: Strip, cell: int | None, scratch: Scratch, pause: Pause) -> Sums:
    """Return the weights of complete rows, summed up in cells of neighbouring keys.

    Args:
        strip: the rows.
        cell: keys in a cell; cells count from key 0. None: any size, for the normalizers alone.
        scratch: memory that is used again.
        pause: called before each part; an exception that it raises ends the pass.
    """
    step = max(1, PART // max(_LEAST, strip.height))
    cell = cell or step
    step = -(-step // cell) * cell
    # Rows without keys still have an answer.
    columns = strip.columns if length(strip.columns) else slice(0, 1)
    start, stop = columns.start // cell * cell, columns.stop
    maxima: list[Tensor] = []
    powers: list[Tensor] = []
    for at in range(start, stop, step):
        pause()
        scores = strip.scores(slice(at, min(at + step, stop)), scratch)
        maximum = scores.amax(-1)
        scores.sub_(_finite(maximum)[:, None]).mul_(1 / _LN2).exp2_()
        maxima.append(maximum)
        powers.append(_by_cell(scores, cell))
    each_maximum = torch.stack(maxima, -1)  # (height, parts)
    maximum = each_maximum.amax(-1)
    known, is_empty = _finite(maximum), maximum == -torch.inf
    factors = (each_maximum - known[:, None]).exp()  # (height, parts)
    totals = torch.stack([part.sum(-1) for part in powers], -1)
    log_normalizer = (totals * factors).sum(-1).log()
    sink = strip.sink()
    if sink is not None:
        log_normalizer = torch.logaddexp(log_normalizer, sink - known)
    normalizers = Normalizers(maximum, log_normalizer.masked_fill(is_empty, 0))
    factors.mul_((-normalizers.log_normalizer).exp()[:, None])
    for part, factor in zip(powers, factors.unbind(-1), strict=True):
        part.mul_(factor[:, None])
    return Sums(normalizers, start // cell, torch.cat(powers, -1))


def window(
    strip: Strip,
    columns: slice,
    cell: int,
    normalizers: Normalizers,
    scratch: Scratch,
    pause: Pause,
) -> Tensor:
    """Return the weights at some keys, summed up in cells: (height, cells).

    Args:
        strip: the rows.
        columns: which keys; cells count from the first of them.
        cell: keys in a cell.
        normalizers: of each row, from ``sums``.
        scratch: memory that is used again.
        pause: called before each part; an exception that it raises ends the work.
    """
    step = -(-max(1, PART // max(_LEAST, strip.height)) // cell) * cell
    parts: list[Tensor] = []
    for at in range(columns.start, columns.stop, step):
        pause()
        part = slice(at, min(at + step, columns.stop))
        if length(overlap(part, strip.columns)):
            parts.append(_by_cell(normalizers.weights_(strip.scores(part, scratch)), cell))
        else:
            nothing = normalizers.maximum.new_zeros(strip.height, length(part))
            parts.append(_by_cell(nothing, cell))
    return torch.cat(parts, -1)


def _widened(part: slice, tokens: int) -> tuple[slice, slice]:
    """Return at least 8 tokens where there are so many, and where the part lies in them."""
    start = max(0, min(part.start, tokens - _LEAST))
    stop = min(tokens, max(part.stop, start + _LEAST))
    return slice(start, stop), slice(part.start - start, part.stop - start)


def _by_cell(values: Tensor, cell: int) -> Tensor:
    """Add each `cell` neighbours of each row in a new tensor; the last may be fewer."""
    height, width = values.shape
    whole = width // cell * cell
    cells = values[:, :whole].reshape(height, -1, cell).sum(-1)
    if whole == width:
        return cells
    return torch.cat([cells, values[:, whole:].sum(-1, keepdim=True)], -1)


def _finite(values: Tensor) -> Tensor:
    """Return the values with 0 for -inf: a score of -inf less -inf would be NaN."""
    return values.masked_fill(values == -torch.inf, 0)
