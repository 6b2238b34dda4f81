"""Kernel launches: the grid of programs and the kernel arguments for a set of operands."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import e, log2
from typing import Any, NamedTuple, cast

import torch
import triton  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from regard.backends.triton import column_kernels as columns
from regard.backends.triton import pool_kernels as pooled
from regard.backends.triton import row_kernels as rows
from regard.backends.triton import tile
from regard.backends.triton import top_k_kernels as top
from regard.backends.triton.configs import INTERPRETED, Config, Kernel, config
from regard.backends.triton.operands import Operands, Plane

__all__ = ["Launch", "RowStatistics", "interpreted", "pieces_of"]

# Slot widths besides a whole tile. More widths would waste less of each slot, but each pair of a
# row width and a column width is one launch and one kernel to compile.
NARROW = (2, 8, 32)


class RowStatistics(NamedTuple):
    """The requested row statistics, each (batch, num_heads, q_len); None if not requested.

    Attributes:
        logsumexp: in nats, float32.
        norms: the row maximum and log of the sum, which the other passes need.
        entropy: in nats, float32.
        mass: the sum of the weights, float32.
        value: the largest weight, float32.
        best: its key, int64.
        tiles: int32, (batch, num_heads, q_len, slots): the tiles with the largest scores, an input
            of ``Launch.top``.
        least: a score that the k largest are not below, likewise.
    """

    logsumexp: Tensor
    norms: tile.Norms
    entropy: Tensor | None
    mass: Tensor | None
    value: Tensor | None
    best: Tensor | None
    tiles: Tensor | None
    least: Tensor | None


class _Group(NamedTuple):
    slot: int
    begin: int
    end: int


class _Pieces(NamedTuple):
    table: Tensor  # int32, (pieces, 5): start, length, number, span, opens; narrow pieces first
    groups: list[_Group]  # pieces of one width of slot
    first: Tensor  # int32, (spans + 1,): the number of the first piece of each span; how many


def interpreted() -> bool:
    """Return True if Triton interprets the kernels on the CPU (TRITON_INTERPRET=1)."""
    return not isinstance(rows.rows_kernel, triton.JITFunction)


@dataclass(frozen=True, eq=False)
class Launch:
    """Launches of the kernels for one matrix.

    Attributes:
        given: the operands of the kernels.
    """

    given: Operands

    def rows(
        self, *, entropy: bool = False, mass: bool = False, largest: bool = False, k: int = 0
    ) -> RowStatistics:
        """Compute the logsumexp of each row, and the statistics requested.

        Args:
            entropy: also compute the entropy of each row.
            mass: also compute the sum of the weights of each row.
            largest: also compute the largest weight and its key.
            k: if not 0, also list the tiles that a following ``top`` with this k needs.
        """
        size = self.given.shape[:-1]
        slots = _power_of_2(k) if k else 0
        found = RowStatistics(
            self._empty(size),
            tile.Norms(self._empty(size), self._empty(size)),
            self._empty(size) if entropy else None,
            self._empty(size) if mass else None,
            self._empty(size) if largest else None,
            self._empty(size, torch.int64) if largest else None,
            self._empty((*size, slots), torch.int32) if k else None,
            self._empty(size) if k else None,
        )
        chosen = self._config("rows", k)
        answers = rows.RowAnswers(*found)
        extra = (self.given.sink, answers, k)
        self._run(rows.rows_kernel, self._row_tiles(chosen), extra, chosen, K=slots)
        return found

    def top(self, found: RowStatistics, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest weights of each row and their keys, (batch, num_heads, q_len, k)."""
        assert found.tiles is not None
        size = (*self.given.shape[:-1], k)
        values, indices = self._empty(size), self._empty(size, torch.int64)
        # The listed tiles have the width of the first pass.
        chosen = replace(self._config("top", k), block_n=self._config("rows", k).block_n)
        extra = (found.norms, found.tiles, found.least, values, indices, k)
        self._run(top.top_kernel, self._row_tiles(chosen), extra, chosen, K=found.tiles.shape[-1])
        return values, indices

    def column_sums(self, norms: tile.Norms) -> Tensor:
        """Return the sum of the weights of each key, (batch, num_heads, kv_len)."""
        sums = self._empty((*self.given.shape[:2], self.given.shape[-1]))
        self._columns(norms, sums, None, None)
        return sums

    def transposed_product(self, norms: tile.Norms, operand: Tensor) -> Tensor:
        """Return weights.mT @ operand, float32, (batch, num_heads, kv_len, width).

        Args:
            norms: the norms of the rows.
            operand: (batch, heads, q_len, width); heads may be grouped; the last stride is 1.
        """
        size = (*self.given.shape[:2], self.given.shape[-1], operand.shape[-1])
        products = self._empty(size)
        self._columns(norms, None, operand, products)
        return products

    def spans(self, norms: tile.Norms, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        """Return the sums of weights, (batch, num_heads, row spans, column spans).

        Args:
            norms: the norms of the rows.
            of_rows: (start, stop) of each span of queries, int64, (spans, 2), on the CPU.
            of_columns: (start, stop) of each span of keys, likewise.
        """
        chosen = self._config("pooled")
        down, across = pieces_of(of_rows, chosen.block_m), pieces_of(of_columns, chosen.block_n)
        batch, num_heads = self.given.shape[:2]
        count, height, width = len(down.table), len(of_rows), len(of_columns)
        sums = torch.zeros((batch, num_heads, count, width), device=self.given.query.device)
        placed = self._pieces(down, 2), self._pieces(across, 3)
        for groups in product(down.groups, across.groups):
            pieces = [
                table[group.begin : group.end] for table, group in zip(placed, groups, strict=True)
            ]
            row_slot, column_slot = (group.slot for group in groups)
            tiles = _ceil(len(pieces[0]), chosen.block_m // row_slot)
            sizes = {"ROW_SLOT": row_slot, "COLUMN_SLOT": column_slot}
            extra = (norms, *pieces, *map(len, pieces), sums, count, width)
            self._run(pooled.pooled_kernel, tiles * batch * num_heads, extra, chosen, **sizes)
        return sums if count == height else self._joined(sums, down.first)

    def _joined(self, sums: Tensor, first: Tensor) -> Tensor:
        """Add the pieces of each span of queries."""
        batch, num_heads, count, width = sums.shape
        height = len(first) - 1
        answers = self._empty((batch, num_heads, height, width))
        first = first.to(sums.device, non_blocking=True)
        kernel = cast(Any, pooled.joined_kernel)
        with torch.cuda.device_of(sums):
            programs = batch * num_heads * height
            kernel[(programs,)](sums, first, answers, count, height, width, BLOCK=128)
        return answers

    def _columns(
        self,
        norms: tile.Norms,
        sums: Tensor | None,
        operand: Tensor | None,
        products: Tensor | None,
    ) -> None:
        batch, num_heads, _, kv_len = self.given.shape
        width = 1 if operand is None else operand.shape[-1]
        chosen = self._config("columns" if operand is None else "products", operand=operand)
        programs = _ceil(kv_len, chosen.block_n) * batch * num_heads
        tokens = None if operand is None else _tokens(operand)
        group = 1 if operand is None else num_heads // operand.shape[1]
        sizes = {"OPERAND_GROUP": group, "WIDTH": width}
        extra = (norms, sums, tokens, products)
        self._run(columns.columns_kernel, programs, extra, chosen, **sizes)

    @cached_property
    def _arguments(self) -> tuple[Any, ...]:
        """The leading arguments of every kernel."""
        given, limits = self.given, self.given.limits
        _, num_heads, q_len, kv_len = given.shape
        usual = given.bias is None and given.softcap is None
        to_bits = (given.scale if usual else 1.0) * log2(e)
        keep = None if limits.keep is None else Plane(limits.keep.view(torch.uint8), False)
        return (
            _tokens(given.query),
            _tokens(given.key),
            tile.Shape(q_len, kv_len, num_heads),
            tile.Steps(given.scale, given.softcap, to_bits),
            _plane(given.bias, q_len),
            tile.Limits(
                limits.low,
                limits.high,
                limits.lengths,
                *_strides(limits.lengths),
                limits.first,
                limits.stop,
                *_strides(limits.first),
                limits.shift,
            ),
            _plane(keep, q_len),
        )

    def _config(self, kernel: Kernel, k: int = 0, operand: Tensor | None = None) -> Config:
        if interpreted():
            return INTERPRETED
        query = self.given.query
        capability = torch.cuda.get_device_capability(query.device)
        more = (self.given.bias, self.given.softcap, self.given.limits.keep)
        crowded = any(each is not None for each in more)
        widest, dtype = query.shape[-1], query.dtype
        if operand is not None:
            widest = max(widest, operand.shape[-1])
            dtype = operand.dtype if operand.dtype == torch.float32 else dtype
        return config(kernel, widest, dtype, capability, k=k, crowded=crowded)

    def _row_tiles(self, chosen: Config) -> int:
        batch, num_heads, q_len, _ = self.given.shape
        kv_heads = self.given.key.shape[1]
        return _ceil(num_heads // kv_heads * q_len, chosen.block_m) * batch * kv_heads

    def _run(
        self, kernel: Any, programs: int, extra: tuple[Any, ...], chosen: Config, **sizes: int
    ) -> None:
        query = self.given.query
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        with torch.cuda.device_of(query):
            kernel[(programs,)](
                *self._arguments,
                *extra,
                GROUP=self.given.group,
                HEAD_DIM=query.shape[-1],
                UPCAST=interpreted(),  # the interpreter multiplies the bits of bfloat16 as integers
                BLOCK_M=chosen.block_m,
                BLOCK_N=chosen.block_n,
                **sizes,
                **options,
                enable_fp_fusion=True,
            )

    def _empty(self, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.given.query.device)

    def _pieces(self, pieces: _Pieces, into: int) -> Tensor:
        """Return (start, length, target, opens) of each piece on the device, (pieces, 4).

        Each piece takes 16 bytes, so that every group of pieces starts at an aligned address.

        Args:
            pieces: the pieces of all spans.
            into: the column of the table that holds the index of the sum.
        """
        return pieces.table[:, [0, 1, into, 4]].to(self.given.query.device, non_blocking=True)


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Return the strides of the batch and the heads."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _tokens(tensor: Tensor) -> tile.Tokens:
    return tile.Tokens(tensor, *_strides(tensor), tensor.stride(2))


def _plane(plane: Plane | None, q_len: int) -> tile.Plane:
    if plane is None:
        return tile.Plane(None, 0, 0, 0, 0)
    numbers = plane.numbers
    if plane.diagonal:
        return tile.Plane(numbers[..., q_len - 1 :], *_strides(numbers), -1, 1)
    return tile.Plane(numbers, *_strides(numbers), numbers.stride(2), numbers.stride(3))


def _ceil(number: int, step: int) -> int:
    return -(-number // step)


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def pieces_of(spans: Tensor, block: int) -> _Pieces:
    """Cut each span into pieces of nearly equal length, each at most a block long.

    Args:
        spans: (start, stop), int64, (spans, 2).
        block: the largest number of tokens in a piece.
    """
    lengths = spans[:, 1] - spans[:, 0]
    counts = -(-lengths // block)
    first = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    span = torch.arange(len(spans), device="cpu").repeat_interleave(counts)
    number = torch.arange(len(span), device="cpu")
    place = number - first[span]
    starts = place * lengths[span] // counts[span]
    stops = (place + 1) * lengths[span] // counts[span]
    table = torch.stack((spans[span, 0] + starts, stops - starts, number, span, place == 0), -1)
    # All pieces of a span use slots of one width.
    slots = [*(width for width in NARROW if width < block), block]
    slot = torch.searchsorted(torch.tensor(slots, device="cpu"), -(-lengths[span] // counts[span]))
    ends = [int((slot <= place).sum()) for place in range(len(slots))]
    groups = [
        _Group(width, begin, end)
        for width, begin, end in zip(slots, [0, *ends[:-1]], ends, strict=True)
        if begin < end
    ]
    return _Pieces(table[slot.argsort(stable=True)].int(), groups, first.int())
