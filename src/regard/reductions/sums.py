"""Sums of weights: over rows and columns, grid cells, text segments, and diagonals."""

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from regard.errors import check_count, check_memory, check_spans, check_whole
from regard.reductions.block import RowStatistics
from regard.reductions.needs import Needs
from regard.reductions.reduction import Contribution, Reduction
from regard.reductions.span_sums import span_sums
from regard.scores.box import int_tensor
from regard.scores.score_source import sum_dtype

_START, _STOP = itemgetter(0), itemgetter(1)
Spans = tuple[tuple[int, int], ...]
"""(start, stop) pairs."""


class SumsOfRows(Reduction):
    """A reduction that sums weights over parts of the rows."""

    @property
    def needs(self) -> Needs:
        return Needs(sums=(self,))

    @abstractmethod
    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        """Return the part of ``rows`` that each sum covers, counted from ``rows.start``.

        The parts are in rising order and do not overlap.
        """

    @abstractmethod
    def spans(self, shape: torch.Size) -> tuple[Spans, Spans | None]:
        """Return the spans of queries and of keys that are summed; None: each key by itself.

        Spans of queries are in rising order and do not overlap.
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
    by_heads = True

    dim: int

    def __post_init__(self) -> None:
        if self.dim not in (-1, -2):
            raise ValueError(
                f"dim is {self.dim}; it must be -1 (over the keys) or -2 (over the queries).\n"
                "    Sum the answer over other axes."
            )

    @property
    def needs(self) -> Needs:
        return Needs() if self.dim == -1 else super().needs

    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        return [] if self.dim == -1 else [slice(0, rows.stop - rows.start)]

    def spans(self, shape: torch.Size) -> tuple[Spans, Spans | None]:
        return ((0, shape[-2]),), None

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
    by_heads = True

    rows_wanted: int
    columns_wanted: int

    def __init__(self, rows: int, columns: int) -> None:
        check_count("rows", rows)
        check_count("columns", columns)
        object.__setattr__(self, "rows_wanted", rows)
        object.__setattr__(self, "columns_wanted", columns)

    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        return self.grid(shape).parts(rows, shape)

    def spans(self, shape: torch.Size) -> tuple[Spans, Spans | None]:
        return self.grid(shape).spans(shape)

    def grid(self, shape: torch.Size) -> "Segments":
        """Return the segments whose spans are the cells."""
        return _grid(self._cells(shape), shape[-2:])

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
        return self.grid(block.shape).update(block)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        (total,) = buffers
        axes = zip(shape[-2:], self._cells(shape), strict=True)
        edges = (torch.arange(n + 1, device=total.device) * length // n for length, n in axes)
        rows, columns = (edge.diff().to(total.dtype) for edge in edges)
        return total / (rows[:, None] * columns)


@lru_cache(maxsize=8)
def _grid(cells: tuple[int, int], lengths: tuple[int, int]) -> "Segments":
    """Return the segments whose spans are the cells of a grid."""
    axes = zip(lengths, cells, strict=True)
    edges = ([cell * length // n for cell in range(n + 1)] for length, n in axes)
    return Segments(*(list(pairwise(edge)) for edge in edges))


class _Spans(NamedTuple):
    """Spans in a form that can be compared and hashed."""

    names: tuple[object, ...] | None
    pairs: tuple[tuple[int, int], ...]


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
    by_heads = True

    query_spans: Mapping[str, tuple[int, int]] | Sequence[tuple[int, int]] = field(compare=False)
    key_spans: Mapping[str, tuple[int, int]] | Sequence[tuple[int, int]] | None = field(
        default=None, compare=False
    )
    _queries: _Spans = field(init=False, repr=False)
    _keys: _Spans = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = self.query_spans if self.key_spans is None else self.key_spans
        object.__setattr__(self, "_queries", _normalised(self.query_spans))
        object.__setattr__(self, "_keys", _normalised(keys))

    def rows(self, q_len: int) -> range:
        spans = check_spans("query_spans", self.query_spans, "q_len", q_len)
        return range(min(start for start, _ in spans), max(stop for _, stop in spans))

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        check_spans("query_spans", self.query_spans, "q_len", shape[-2])
        keys = self.query_spans if self.key_spans is None else self.key_spans
        check_spans("key_spans", keys, "kv_len", shape[-1])
        size = (*shape[:-2], len(self.query_parts), len(self._keys.pairs))
        dtype = sum_dtype(dtype, device)
        check_memory("Segments", size, dtype, remedy="Ask for fewer spans.")
        return (torch.zeros(size, dtype=dtype, device=device),)

    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        return [
            slice(max(start, rows.start) - rows.start, min(stop, rows.stop) - rows.start)
            for start, stop in self.query_parts[_overlapping(self.query_parts, rows)]
        ]

    def spans(self, shape: torch.Size) -> tuple[Spans, Spans | None]:
        return tuple(self.query_parts), self._keys.pairs

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        rows, columns = block.box.rows, block.box.columns
        pairs = self._keys.pairs
        keys = _overlapping(pairs, columns) if self._keys_in_order else slice(0, len(pairs))
        at = (*block.box.leading, _overlapping(self.query_parts, rows), keys)
        parts = self.parts(rows, block.shape)
        spans = [(start - columns.start, stop - columns.start) for start, stop in pairs[keys]]
        if not (parts and spans):
            return (Contribution(at, block.maximum.new_zeros(len(parts), len(spans))),)
        return (Contribution(at, block.sum_cells(parts, spans)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        (by_part,) = buffers
        spans = self._queries.pairs
        firsts = [bisect_left(self.query_parts, start, key=_START) for start, _ in spans]
        ends = [bisect_right(self.query_parts, stop, key=_STOP) for _, stop in spans]
        parts_of_spans = list(zip(firsts, ends, strict=True))
        by_span = span_sums(by_part.mT, parts_of_spans).mT.to(by_part.dtype)
        lengths = int_tensor([stop - start for start, stop in spans], by_part.device)
        return by_span / lengths[:, None]

    @cached_property
    def key_edges(self) -> Tensor:
        """The start and stop of each key span, (key spans, 2), on the CPU."""
        return torch.tensor(self._keys.pairs, device="cpu")

    @cached_property
    def _keys_in_order(self) -> bool:
        """True if the key spans are in rising order and do not overlap."""
        return all(stop <= start for (_, stop), (start, _) in pairwise(self._keys.pairs))

    @cached_property
    def query_parts(self) -> list[tuple[int, int]]:
        """Disjoint spans in rising order; each query span is a run of consecutive ones."""
        spans = self._queries.pairs
        opened, closed = Counter(start for start, _ in spans), Counter(stop for _, stop in spans)
        parts: list[tuple[int, int]] = []
        depth = 0
        for start, stop in pairwise(sorted(opened.keys() | closed.keys())):
            depth += opened[start] - closed[start]
            if depth:
                parts.append((start, stop))
        return parts


def _normalised(spans: Any) -> _Spans:
    """Return the names and the (start, stop) pairs of spans; no pairs if the spans are invalid."""
    names, pairs = None, spans
    if isinstance(spans, Mapping):
        named = cast("Mapping[object, Any]", spans)
        names, pairs = tuple(named), named.values()
    try:
        return _Spans(names, tuple((int(start), int(stop)) for start, stop in pairs))
    except (TypeError, ValueError, OverflowError):
        return _Spans(names, ())  # ``start`` raises the clear error


def _overlapping(spans: Sequence[tuple[int, int]], part: slice) -> slice:
    """Return which of some disjoint spans in rising order overlap a part."""
    first = bisect_right(spans, part.start, key=_STOP)
    return slice(first, max(first, bisect_left(spans, part.stop, key=_START)))


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
    by_heads = True

    offset: int = 0

    def __post_init__(self) -> None:
        check_whole("offset", self.offset)

    @property
    def needs(self) -> Needs:
        return Needs(offsets=(self.offset,))

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
