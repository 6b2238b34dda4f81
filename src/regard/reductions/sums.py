"""Sums of weights: over rows and columns, grid cells, text segments, and diagonals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast, final

import torch
from torch import Tensor

from regard.errors import check_count, check_memory, check_spans, check_whole
from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction
from regard.scores.box import int_tensor

__all__ = ["Diagonal", "Pool", "Segments", "Sum"]


@final
@dataclass(frozen=True)
class Sum(Reduction):
    """The sum of the weights over the keys (dim=-1) or over the queries (dim=-2).

    Over the queries it is the attention that each key receives, (..., num_heads, kv_len). Over the
    keys it is 1, less beside a sink, 0 for a query with no key, (..., num_heads, q_len).

    Args:
        dim: -1 or -2.

    Raises:
        ValueError: another axis.

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

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        length = shape[-2] if self.dim == -1 else shape[-1]
        return (torch.zeros((*shape[:-2], length), dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        if self.dim == -1:
            return (Contribution(block.box.at_rows, block.weights.sum(-1)),)
        return (Contribution(block.box.at_columns, block.column_sum),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


@final
@dataclass(frozen=True)
class Pool(Reduction):
    """The matrix as a picture: the mean weight in each cell of a rows x columns grid.

    The answer has shape (..., num_heads, min(rows, q_len), min(columns, kv_len)). Cell i of an axis
    of n cells holds positions ``floor(i * length / n)`` up to ``floor((i + 1) * length / n)``.

    Args:
        rows: at most how many cells along the queries.
        columns: at most how many cells along the keys.

    Raises:
        TypeError: not whole numbers.
        ValueError: below 1.

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

    def _cells(self, shape: torch.Size) -> tuple[int, int]:
        return min(self.rows_wanted, shape[-2]), min(self.columns_wanted, shape[-1])

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        size = (*shape[:-2], *self._cells(shape))
        check_memory("Pool", size, dtype, remedy="Ask for fewer cells, A.pool(512, 512).")
        return (torch.zeros(size, dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        row_cells, column_cells = self._cells(block.shape)
        first, rows = _cells_met(block.box.rows, block.shape[-2], row_cells)
        start, columns = _cells_met(block.box.columns, block.shape[-1], column_cells)
        by_row = block.column_sum[..., None, :] if len(rows) == 1 else block.sum_rows(rows)
        widths = {part.stop - part.start for part in columns}
        if len(widths) == 1:
            pooled = by_row.view(*by_row.shape[:-1], len(columns), widths.pop()).sum(-1)
        else:
            at = torch.arange(block.box.columns.start, block.box.columns.stop, device=by_row.device)
            cell = ((at + 1) * column_cells - 1) // block.shape[-1] - start
            pooled = by_row.new_zeros((*by_row.shape[:-1], len(columns)))
            pooled = pooled.index_add(-1, cell, by_row)
        cells = slice(first, first + len(rows)), slice(start, start + len(columns))
        return (Contribution((*block.box.leading, *cells), pooled),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        (total,) = buffers
        row_cells, column_cells = self._cells(shape)
        rows = _cell_lengths(shape[-2], row_cells, total)
        columns = _cell_lengths(shape[-1], column_cells, total)
        return total / (rows[:, None] * columns)


def _cells_met(part: slice, length: int, cells: int) -> tuple[int, list[slice]]:
    """The first cell that a part of an axis meets, and where in the part each cell lies."""
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
class Segments(Reduction):
    """How much each span of queries attends to each span of keys.

    Entry [i, j] is the weight that a query of span i gives to span j as a whole, in the mean over
    the queries of span i. Where the key spans cover every key once, the rows sum to 1. The answer
    has shape (..., num_heads, query spans, key spans).

    Two are equal that ask for the same spans under the same names, in the same order.

    Args:
        query_spans: (start, stop) pairs, or a mapping from names to them.
        key_spans: the same for the keys; the query spans when left out.

    Raises:
        TypeError: not pairs of whole numbers.
        ValueError: no spans, an empty span, or one that reaches beyond the text.

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

    def _spans(self, shape: torch.Size) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        keys = self.query_spans if self.key_spans is None else self.key_spans
        return (
            check_spans("query_spans", self.query_spans, "q_len", shape[-2]),
            check_spans("key_spans", keys, "kv_len", shape[-1]),
        )

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        queries, keys = self._spans(shape)
        size = (*shape[:-2], len(queries), len(keys))
        check_memory("Segments", size, dtype, remedy="Ask for fewer spans.")
        return (torch.zeros(size, dtype=dtype, device=device),)

    def update(self, block: Block) -> tuple[Contribution, ...]:
        queries, keys = self._spans(block.shape)
        rows, columns = block.box.rows, block.box.columns
        met = [place for place, span in enumerate(queries) if _meets(span, rows)]
        if not met:
            return (
                Contribution(
                    (*block.box.leading, slice(0, 0)), block.log2_shifted.new_zeros(0, len(keys))
                ),
            )
        by_query = block.sum_rows([_within(queries[place], rows) for place in met])
        mass = by_query @ _member(columns, keys, by_query).mT
        total = mass.new_zeros((*mass.shape[:-2], len(queries), len(keys)))
        at = int_tensor(met, mass.device)
        return (Contribution(block.box.leading, total.index_copy(-2, at, mass)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        lengths = [stop - start for start, stop in self._spans(shape)[0]]
        return buffers[0] / int_tensor(lengths, buffers[0].device)[:, None]


def _as_tuples(spans: object) -> Any:
    """Spans with their names, in their order, as a dict does not compare; no spans as they are."""
    if isinstance(spans, Mapping):
        named = cast("Mapping[object, object]", spans)
        return tuple((name, _as_tuples(span)) for name, span in named.items())
    if isinstance(spans, Sequence) and not isinstance(spans, str):
        return tuple(map(_as_tuples, cast("Sequence[object]", spans)))
    return spans


def _meets(span: tuple[int, int], part: slice) -> bool:
    return span[0] < part.stop and part.start < span[1]


def _within(span: tuple[int, int], part: slice) -> slice:
    """Where in the part the span lies."""
    return slice(max(span[0], part.start) - part.start, min(span[1], part.stop) - part.start)


def _member(part: slice, spans: list[tuple[int, int]], like: Tensor) -> Tensor:
    """1 where a position of the part lies in a span, (spans, part)."""
    positions = torch.arange(part.start, part.stop, device=like.device)
    edges = int_tensor(spans, like.device)
    return ((positions >= edges[:, :1]) & (positions < edges[:, 1:])).to(like.dtype)


@final
@dataclass(frozen=True)
class Diagonal(Reduction):
    """The weights A[i, i + offset], as ``torch.diagonal`` has them.

    Offset -1 is the attention to the previous token, 0 to itself. The answer has shape
    (..., num_heads, n), where n is the length of that diagonal.

    Args:
        offset: kv_idx - q_idx.

    Raises:
        TypeError: offset is no whole number.

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

    def update(self, block: Block) -> tuple[Contribution, ...]:
        rows, columns = block.box.rows, block.box.columns
        offset = self.offset + rows.start - columns.start
        values = block.weights.diagonal(offset, dim1=-2, dim2=-1)
        first = rows.start + max(0, -offset) + min(self.offset, 0)
        return (Contribution((*block.box.leading, slice(first, first + values.shape[-1])), values),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]
