"""From tensors to a grid of programs and the arguments of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import e, log2
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from regard.backends.triton import columns, pooled, rows, tile, top
from regard.backends.triton.configs import INTERPRETED, Config, Kernel, config
from regard.backends.triton.operands import Operands, Plane

__all__ = ["Launch", "RowStatistics", "interpreted", "pieces_of"]


class RowStatistics(NamedTuple):
    """What was asked of the rows, each (batch, num_heads, q_len); None: not asked.

    Attributes:
        logsumexp: in nats, float32.
        entropy: in nats, float32.
        mass: the sum of the weights, float32.
        value: the largest weight, float32.
        best: its key, int64.
        tiles: int32, the best tiles, (batch, num_heads, q_len, slots): what ``Launch.top`` needs.
    """

    logsumexp: Tensor
    entropy: Tensor | None
    mass: Tensor | None
    value: Tensor | None
    best: Tensor | None
    tiles: Tensor | None


class _Pieces(NamedTuple):
    table: Tensor  # int32, (4, pieces): start, length, span, opens
    longest: int
    spans: int


def interpreted() -> bool:
    """Whether Triton interprets the kernels, on the CPU and slowly: TRITON_INTERPRET=1."""
    return not isinstance(rows.rows_kernel, triton.JITFunction)


@dataclass(frozen=True, eq=False)
class Launch:
    """The kernels on one matrix.

    Attributes:
        given: what they compute with.
    """

    given: Operands

    def rows(
        self, *, entropy: bool = False, mass: bool = False, largest: bool = False, k: int = 0
    ) -> RowStatistics:
        """The logsumexp of each row and what else is asked; k: of a top-k that follows."""
        size = self.given.shape[:-1]
        slots = _power_of_2(k) if k else 0
        found = RowStatistics(
            self._empty(size),
            self._empty(size) if entropy else None,
            self._empty(size) if mass else None,
            self._empty(size) if largest else None,
            self._empty(size, torch.int64) if largest else None,
            self._empty((*size, slots), torch.int32) if k else None,
        )
        chosen = self._config("rows", k)
        answers = rows.RowAnswers(*found)
        extra = (self.given.sink, answers, k)
        self._run(rows.rows_kernel, self._row_tiles(chosen), extra, chosen, K=slots)
        return found

    def top(self, logsumexp: Tensor, tiles: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their keys, (batch, num_heads, q_len, k)."""
        size = (*self.given.shape[:-1], k)
        values, indices = self._empty(size), self._empty(size, torch.int64)
        # The tiles that are listed are those of the first pass.
        chosen = replace(self._config("top", k), block_n=self._config("rows", k).block_n)
        extra = (logsumexp, tiles, values, indices, k)
        self._run(top.top_kernel, self._row_tiles(chosen), extra, chosen, K=tiles.shape[-1])
        return values, indices

    def column_sums(self, logsumexp: Tensor) -> Tensor:
        """What each key receives, (batch, num_heads, kv_len)."""
        sums = self._empty((*self.given.shape[:2], self.given.shape[-1]))
        self._columns(logsumexp, sums, None, None)
        return sums

    def transposed_product(self, logsumexp: Tensor, operand: Tensor) -> Tensor:
        """weights transposed @ operand, float32, (batch, num_heads, kv_len, width).

        Args:
            logsumexp: of the rows.
            operand: (batch, heads, q_len, width), the heads in groups; its last stride is 1.
        """
        size = (*self.given.shape[:2], self.given.shape[-1], operand.shape[-1])
        products = self._empty(size)
        self._columns(logsumexp, None, operand, products)
        return products

    def spans(self, logsumexp: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        """The mass of spans on spans, (batch, num_heads, row spans, column spans).

        Args:
            logsumexp: of the rows.
            of_rows: (start, stop) of spans of queries, int64, (spans, 2), on the CPU.
            of_columns: the same for the keys.
        """
        chosen = self._config("pooled")
        down, across = pieces_of(of_rows, chosen.block_m), pieces_of(of_columns, chosen.block_n)
        slots = [
            min(block, _power_of_2(pieces.longest))
            for block, pieces in ((chosen.block_m, down), (chosen.block_n, across))
        ]
        batch, num_heads = self.given.shape[:2]
        count = down.table.shape[-1]
        sums = torch.zeros((batch, num_heads, count, across.spans), device=logsumexp.device)
        programs = _ceil(count, chosen.block_m // slots[0]) * batch * num_heads
        extra = (logsumexp, self._pieces(down), self._pieces(across), sums)
        sizes = {"ROW_SLOT": slots[0], "COLUMN_SLOT": slots[1]}
        self._run(pooled.pooled_kernel, programs, extra, chosen, **sizes)
        if count == down.spans:
            return sums
        # In float64, since a product of float32 may be rounded to tf32.
        of_span = down.table[2] == torch.arange(down.spans)[:, None]
        return (of_span.to(sums.device, torch.float64, non_blocking=True) @ sums.double()).float()

    def _columns(
        self,
        logsumexp: Tensor,
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
        extra = (logsumexp, sums, tokens, products)
        self._run(columns.columns_kernel, programs, extra, chosen, **sizes)

    @cached_property
    def _arguments(self) -> tuple[Any, ...]:
        """What every kernel starts with."""
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
                UPCAST=interpreted() and query.dtype == torch.bfloat16,
                BLOCK_M=chosen.block_m,
                BLOCK_N=chosen.block_n,
                **sizes,
                **options,
                enable_fp_fusion=True,
            )

    def _empty(self, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.given.query.device)

    def _pieces(self, pieces: _Pieces) -> pooled.Pieces:
        table = pieces.table.to(self.given.query.device, non_blocking=True)
        return pooled.Pieces(table[0], table[1], table[2], table[3], table.shape[-1], pieces.spans)


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Of the batch and the heads."""
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
    """Spans cut into pieces of at most a block, nearly equal in each span.

    Args:
        spans: (start, stop), int64, (spans, 2).
        block: the most tokens of a piece.
    """
    lengths = spans[:, 1] - spans[:, 0]
    counts = -(-lengths // block)
    span = torch.arange(len(spans)).repeat_interleave(counts)
    place = torch.arange(len(span)) - (counts.cumsum(0) - counts)[span]
    starts = place * lengths[span] // counts[span]
    stops = (place + 1) * lengths[span] // counts[span]
    table = torch.stack((spans[span, 0] + starts, stops - starts, span, (place == 0).long()))
    return _Pieces(table.int(), int((stops - starts).max()), len(spans))
