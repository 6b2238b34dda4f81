"""Sums of weights: over rows and columns, grid cells, text segments, and diagonals."""

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast, final

import torch
from torch import Tensor

from regard.errors import check_count, check_memory, check_spans, check_whole
from regard.reductions.block import RowStatistics
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.box import int_tensor
from regard.scores.score_source import sum_dtype

_FEW_SPANS = 32  # up to this number, summing spans one by one is faster


class SumsOfRows(Reduction):
    """A reduction that sums weights over parts of the rows."""

    @abstractmethod
    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        """Return the part of ``rows`` that each sum covers, counted from ``rows.start``.

        The parts are in rising order and do not overlap.
        """


@final
@dataclass(frozen=True)
class Sum(SumsOfRows):
    """The sum of the weights over the keys (dim=-1) or over the queries (dim=-2).

    The sum over the queries is the attention that each key receives, (..., num_heads, kv_len).
    The sum over the keys, (..., num_heads, q_len), is 1; with a sink_bias it is less, and 0 for a
    query without keys.

    Args:
        dim: -1 or -2.

    Raises:
        ValueError: dim is another axis.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(2, 1)
        >>> regard.attend(x, x, mask=regard.Causal()).reduce(regard.Sum(-2))
        tensor([1.5000, 0.5000])
    """

    thread_safe = True

    dim: int

    def __post_init__(self) -> None:
        if self.dim not in (-1, -2):
            raise ValueError(
                f"dim is {self.dim}; it must be -1 (over the keys) or -2 (over the queries).\n"
                "    Sum the answer over other axes."
            )

    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        return [] if self.dim == -1 else [slice(0, rows.stop - rows.start)]

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        if self.dim == -1:
            return (torch.zeros(shape[:-1], dtype=dtype, device=device),)
        size = (*shape[:-2], shape[-1])
        return (torch.zeros(size, dtype=sum_dtype(dtype, device), device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        if self.dim == -1:
            return (Contribution(block.box.at_rows, block.row_sum),)
        (part,) = self.parts(block.box.rows, block.shape)
        return (Contribution(block.box.at_columns, block.sum_rows([part]).squeeze(-2)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


@final
@dataclass(frozen=True)
class Pool(SumsOfRows):
    """The mean weight in each cell of a grid of rows x columns: the matrix as a picture.

    The answer has shape (..., num_heads, min(rows, q_len), min(columns, kv_len)). Cell i of an axis
    of n cells has the positions from ``floor(i * length / n)`` up to, but not including,
    ``floor((i + 1) * length / n)``.

    Args:
        rows: the largest number of cells along the queries.
        columns: the largest number of cells along the keys.

    Raises:
        TypeError: rows or columns is not a whole number.
        ValueError: rows or columns is below 1.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(4, 1)
        >>> regard.attend(x, x).reduce(regard.Pool(1, 2))
        tensor([[0.2500, 0.2500]])
    """

    thread_safe = True

    rows_wanted: int
    columns_wanted: int

    def __init__(self, rows: int, columns: int) -> None:
        check_count("rows", rows)
        check_count("columns", columns)
        object.__setattr__(self, "rows_wanted", rows)
        object.__setattr__(self, "columns_wanted", columns)

    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        return _cells_met(rows, shape[-2], self._cells(shape)[0])[1]

    def _cells(self, shape: torch.Size) -> tuple[int, int]:
        return min(self.rows_wanted, shape[-2]), min(self.columns_wanted, shape[-1])

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        size = (*shape[:-2], *self._cells(shape))
        dtype = sum_dtype(dtype, device)
        check_memory("Pool", size, dtype, remedy="Ask for fewer cells, A.pool(512, 512).")
        return (torch.zeros(size, dtype=dtype, device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        row_cells, column_cells = self._cells(block.shape)
        first, rows = _cells_met(block.box.rows, block.shape[-2], row_cells)
        start, columns = _cells_met(block.box.columns, block.shape[-1], column_cells)
        by_row = block.sum_rows(rows)
        widths = {part.stop - part.start for part in columns}
        if len(widths) == 1:
            pooled = by_row.view(*by_row.shape[:-1], len(columns), widths.pop()).sum(-1)
        else:
            pooled = _span_sums(by_row, [(part.start, part.stop) for part in columns])
        cells = slice(first, first + len(rows)), slice(start, start + len(columns))
        return (Contribution((*block.box.leading, *cells), pooled),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        (total,) = buffers
        row_cells, column_cells = self._cells(shape)
        rows = _cell_lengths(shape[-2], row_cells, total)
        columns = _cell_lengths(shape[-1], column_cells, total)
        return total / (rows[:, None] * columns)


def _cells_met(part: slice, length: int, cells: int) -> tuple[int, list[slice]]:
    """Return the first cell that overlaps ``part``, and the slice of ``part`` in each such cell."""
    first = ((part.start + 1) * cells - 1) // length
    last = (part.stop * cells - 1) // length
    inner = [cell * length // cells - part.start for cell in range(first + 1, last + 1)]
    edges = [0, *inner, part.stop - part.start]
    return first, [slice(start, stop) for start, stop in pairwise(edges)]


def _cell_lengths(length: int, cells: int, like: Tensor) -> Tensor:
    edges = torch.arange(cells + 1, device=like.device) * length // cells
    return edges.diff().to(like.dtype)


@final
@dataclass(frozen=True)
class Segments(SumsOfRows):
    """The attention that each span of queries pays to each span of keys.

    Entry [i, j] sums the weights of the keys of span j, and takes the mean over the queries of
    span i. The rows sum to 1 if the key spans cover every key once. Spans may overlap. The answer
    has shape (..., num_heads, query spans, key spans).

    Two Segments are equal if they have the same spans with the same names in the same order.

    Args:
        query_spans: (start, stop) pairs, or a mapping from names to pairs.
        key_spans: the same for the keys; the default is the query spans.

    Raises:
        TypeError: the spans are not pairs of whole numbers.
        ValueError: there are no spans, or a span is empty or reaches beyond the text.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(4, 1)
        >>> regard.attend(x, x).reduce(regard.Segments([(0, 1), (1, 4)]))
        tensor([[0.2500, 0.7500],
                [0.2500, 0.7500]])
    """

    thread_safe = True

    query_spans: Mapping[str, tuple[int, int]] | Sequence[tuple[int, int]] = field(compare=False)
    key_spans: Mapping[str, tuple[int, int]] | Sequence[tuple[int, int]] | None = field(
        default=None, compare=False
    )
    _asked: tuple[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = self.query_spans if self.key_spans is None else self.key_spans
        object.__setattr__(self, "_asked", (_as_tuples(self.query_spans), _as_tuples(keys)))

    def rows(self, q_len: int) -> range:
        spans = check_spans("query_spans", self.query_spans, "q_len", q_len)
        return range(min(start for start, _ in spans), max(stop for _, stop in spans))

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        check_spans("query_spans", self.query_spans, "q_len", shape[-2])
        keys = self.query_spans if self.key_spans is None else self.key_spans
        check_spans("key_spans", keys, "kv_len", shape[-1])
        size = (*shape[:-2], len(self.query_pieces), len(self.key_edges))
        dtype = sum_dtype(dtype, device)
        check_memory("Segments", size, dtype, remedy="Ask for fewer spans.")
        return (torch.zeros(size, dtype=dtype, device=device),)

    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        return [_within(piece, rows) for piece in self.query_pieces[self._pieces_met(rows)]]

    def _pieces_met(self, rows: slice) -> slice:
        first = bisect_right(self.query_pieces, rows.start, key=_stop)
        return slice(first, max(first, bisect_left(self.query_pieces, rows.stop, key=_start)))

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        rows, columns = block.box.rows, block.box.columns
        at = (*block.box.leading, self._pieces_met(rows))
        parts = self.parts(rows, block.shape)
        if not parts:
            return (Contribution(at, block.maximum.new_zeros(0, len(self.key_edges))),)
        by_piece = block.sum_rows(parts)
        if len(self.key_edges) > _FEW_SPANS:
            return (Contribution(at, _span_sums(by_piece, self.key_edges - columns.start)),)
        pairs = _pairs(self._asked[1])
        shifted = [(start - columns.start, stop - columns.start) for start, stop in pairs]
        return (Contribution(at, _span_sums(by_piece, shifted)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        (by_piece,) = buffers
        spans = _pairs(self._asked[0])
        firsts = [bisect_left(self.query_pieces, start, key=_start) for start, _ in spans]
        ends = [bisect_right(self.query_pieces, stop, key=_stop) for _, stop in spans]
        pieces_of_spans = list(zip(firsts, ends, strict=True))
        by_span = _span_sums(by_piece.mT, pieces_of_spans).mT.to(by_piece.dtype)
        lengths = int_tensor([stop - start for start, stop in spans], by_piece.device)
        return by_span / lengths[:, None]

    @cached_property
    def key_edges(self) -> Tensor:
        """The start and stop of each key span, (key spans, 2), on the CPU."""
        return torch.tensor(_pairs(self._asked[1]), device="cpu")

    @cached_property
    def query_pieces(self) -> list[tuple[int, int]]:
        """Disjoint spans in rising order; each query span is a run of consecutive ones."""
        spans = _pairs(self._asked[0])
        opened, closed = Counter(start for start, _ in spans), Counter(stop for _, stop in spans)
        pieces: list[tuple[int, int]] = []
        depth = 0
        for start, stop in pairwise(sorted(opened.keys() | closed.keys())):
            depth += opened[start] - closed[start]
            if depth:
                pieces.append((start, stop))
        return pieces


def _as_tuples(spans: object) -> Any:
    """Return spans, with their names, as ordered tuples; return any other object unchanged."""
    if isinstance(spans, Mapping):
        named = cast("Mapping[object, object]", spans)
        return tuple((name, _as_tuples(span)) for name, span in named.items())
    if isinstance(spans, Sequence) and not isinstance(spans, str):
        return tuple(map(_as_tuples, cast("Sequence[object]", spans)))
    return spans


def _pairs(spans: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the (start, stop) pairs in the result of ``_as_tuples``, without names."""
    pairs = (span[1] if isinstance(span[1], tuple) else span for span in spans)
    return [(int(start), int(stop)) for start, stop in pairs]


def _start(span: tuple[int, int]) -> int:
    return span[0]


def _stop(span: tuple[int, int]) -> int:
    return span[1]


def _within(span: tuple[int, int], part: slice) -> slice:
    """Return where a span and a part overlap, counted from the start of the part."""
    return slice(max(span[0], part.start) - part.start, min(span[1], part.stop) - part.start)


def _span_sums(numbers: Tensor, spans: Tensor | Sequence[tuple[int, int]]) -> Tensor:
    """Return the sum over each span of the last axis, (..., spans), in ``sum_dtype``.

    The sums form a binary tree: level n has the sums of 2**n neighbouring numbers. A span needs
    at most two sums from each level. Memory is linear, and spans may overlap. Differences of
    cumulative sums would lose small numbers next to large ones.

    Args:
        numbers: (..., length).
        spans: (start, stop) pairs, clipped to 0 and length; or an int64 tensor of many pairs on the
            CPU.
    """
    # The gradient of indexing is reproducible on a GPU, but on a CPU only in float64.
    numbers = numbers.to(sum_dtype(numbers.dtype, numbers.device))
    if not isinstance(spans, Tensor):
        if len(spans) <= _FEW_SPANS:
            sums = [numbers[..., max(start, 0) : max(stop, 0)].sum(-1) for start, stop in spans]
            return torch.stack(sums, -1)
        spans = torch.tensor(spans, device="cpu")
    start, stop = spans.clamp(0, numbers.shape[-1]).unbind(-1)
    total = numbers.new_zeros((*numbers.shape[:-1], len(spans)))
    while numbers.shape[-1]:
        left = start < stop
        for taken, place in ((left & (start % 2 == 1), start), (left & (stop % 2 == 1), stop - 1)):
            at = place.where(taken, 0).to(numbers.device, non_blocking=True)
            chosen = taken.to(numbers.device, non_blocking=True)
            total = total + torch.where(chosen, numbers[..., at], 0.0)
        start, stop = (start + 1) // 2, stop // 2
        even = numbers.shape[-1] // 2 * 2
        numbers = numbers[..., 0:even:2] + numbers[..., 1:even:2]
    return total


@final
@dataclass(frozen=True)
class Diagonal(Reduction):
    """The weights A[i, i + offset], as in ``torch.diagonal``.

    Offset -1 is the attention to the previous token, offset 0 that of each token to itself. The
    answer has shape (..., num_heads, n), where n is the length of that diagonal.

    Args:
        offset: kv_idx - q_idx.

    Raises:
        TypeError: the offset is not a whole number.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Causal()).reduce(regard.Diagonal(-1))
        tensor([0.5000, 0.3333])
    """

    thread_safe = True

    offset: int = 0

    def __post_init__(self) -> None:
        check_whole("offset", self.offset)

    def _length(self, shape: torch.Size) -> int:
        q_len, kv_len = shape[-2:]
        return max(0, min(q_len, kv_len - self.offset) - max(0, -self.offset))

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros((*shape[:-2], self._length(shape)), dtype=dtype, device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        rows, columns = block.box.rows, block.box.columns
        offset = self.offset + rows.start - columns.start
        values = block.diagonal(self.offset)
        first = rows.start + max(0, -offset) + min(self.offset, 0)
        return (Contribution((*block.box.leading, slice(first, first + values.shape[-1])), values),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]
