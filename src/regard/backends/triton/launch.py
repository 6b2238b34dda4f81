"""Kernel launches: the grid of programs and the kernel arguments for a set of operands."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import e, log, log2
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from regard.backends.triton import bias_kernels as biases
from regard.backends.triton import column_kernels as columns
from regard.backends.triton import divergence_kernels as divergences
from regard.backends.triton import entry_kernels as entries
from regard.backends.triton import gradient_kernels as gradients
from regard.backends.triton import pool_kernels as pooled
from regard.backends.triton import row_kernels as rows
from regard.backends.triton import tile
from regard.backends.triton import top_k_kernels as top
from regard.backends.triton.configs import INTERPRETED, Config, Kernel, config
from regard.backends.triton.gradient_kernels import Grid, Sparse, Terms
from regard.backends.triton.operands import (
    Derivative,
    MatrixNumbers,
    Operands,
    OtherMatrix,
)

# Slot widths besides a whole tile. More widths would waste less of each slot, but each pair of a
# row width and a column width is one launch and one kernel to compile.
NARROW = (2, 8, 32)
KEYS_AT_ONCE = (1, 32)  # summed; each width is one more kernel to compile
_WIDEST_ROUNDED = 128  # head_dim up to which the kernels multiply what rounding loses
GROUPED: int = cast(Any, rows.GROUPED).value
# The sums of a part's tiles are added in float32, which drifts where they are many.
LEAST_TILES, MOST_PARTS = 16, 16


class RowStatistics(NamedTuple):
    """The requested row statistics, each (batch, num_heads, q_len); None if not requested.

    Attributes:
        logsumexp: in nats, float32.
        norms: the row maximum and log of the sum, which the other passes need.
        maximum: the largest score, float32.
        mass: the sum of the weights, float32.
        mean_shifted: the sum of weights * (scores - maximum), in nats, float32.
        tiles: int32, (batch, num_heads, q_len, slots): the tiles with the largest scores, an input
            of ``Launch.top``; of one slot the group of keys.
        maxima: (batch, num_heads, q_len, slots, groups): of the groups in these tiles, likewise;
            None for one slot.
    """

    logsumexp: Tensor
    norms: tile.Norms
    maximum: Tensor
    mass: Tensor
    mean_shifted: Tensor | None = None
    tiles: Tensor | None = None
    maxima: Tensor | None = None


class _Group(NamedTuple):
    slot: int
    begin: int
    end: int


class _PartsOfSpans(NamedTuple):
    table: Tensor  # int32, (parts, 5): start, length, number, span, opens; narrow parts first
    groups: list[_Group]  # parts of one width of slot
    first: Tensor  # int32, (spans + 1,): the number of the first part of each span; how many


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

    def rows(self, *, mean_shifted: bool = False, k: int = 0) -> RowStatistics:
        """Compute the statistics of each row.

        Args:
            mean_shifted: also compute the mean of the shifted scores of each row.
            k: if not 0, also list the tiles that a following ``top`` with this k needs.
        """
        size = self.given.shape[:-1]
        slots = _power_of_2(k) if k else 0
        chosen = self._config("rows", k)
        groups = chosen.block_n // GROUPED
        statistics = RowStatistics(
            self._empty(size),
            tile.Norms(self._empty(size), self._empty(size)),
            self._empty(size),
            self._empty(size),
            self._empty(size) if mean_shifted else None,
            self._empty((*size, slots), torch.int32) if k else None,
            self._empty((*size, slots, groups)) if k > 1 else None,
        )
        visits = self._visits(chosen, packed_rows=True)
        extra = (visits, self.given.sink, rows.RowAnswers(*statistics), k)
        self._run(rows.rows_kernel, self._row_tiles(chosen), extra, chosen, K=slots)
        return statistics

    def top(self, statistics: RowStatistics, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest weights of each row and their keys, (batch, num_heads, q_len, k)."""
        assert statistics.tiles is not None
        size = (*self.given.shape[:-1], k)
        values, indices = self._empty(size), self._empty(size, torch.int64)
        chosen = self._config("top", k)
        extra = (statistics.norms, statistics.tiles, statistics.maxima, values, indices, k)
        groups = 1 if statistics.maxima is None else statistics.maxima.shape[-1]
        sizes = {"K": statistics.tiles.shape[-1], "GROUPS": groups}
        self._run(top.top_kernel, self._row_tiles(chosen), extra, chosen, **sizes)
        return values, indices

    def column_sums(self, norms: tile.Norms) -> Tensor:
        """Return the sum of the weights of each key, float32, (batch, num_heads, kv_len)."""
        chosen = self._config("columns")
        tiles = _ceil(self.given.shape[-2], chosen.block_m)
        of_part = max(LEAST_TILES, _ceil(tiles, MOST_PARTS))
        parts = columns.Parts(None, None), _ceil(tiles, of_part)
        return joined_parts(self._columns(norms, chosen, *parts, 1, TILES=of_part, SPLITS=False))

    def tile_sums(self, norms: tile.Norms, parts: Tensor, keys: int) -> Tensor:
        """Return the mass of tiles, each a part of the rows and some keys.

        Args:
            norms: the norms of the rows.
            parts: (start, stop) of each part, which together are all rows, in their order; none is
                shorter than ``shortest_part``; int64, (parts, 2), on the CPU.
            keys: the number of keys of a tile, one of KEYS_AT_ONCE.

        Returns:
            float32, (batch, num_heads, parts, tiles).
        """
        stops = parts[:, 1].contiguous()
        at = torch.searchsorted(stops, torch.arange(self.given.shape[-2], device="cpu"), right=True)
        device = self.given.query.device
        of_rows = columns.Parts(
            at.int().to(device, non_blocking=True), stops.int().to(device, non_blocking=True)
        )
        chosen = self._config("columns")
        if int(parts.diff().min()) < chosen.block_m:
            chosen = self._config("short_columns")
        splits = bool((stops[:-1] % chosen.block_m).any())
        return self._columns(norms, chosen, of_rows, len(parts), keys, TILES=1, SPLITS=splits)

    def _columns(
        self,
        norms: tile.Norms,
        chosen: Config,
        parts: columns.Parts,
        count: int,
        keys: int,
        **sizes: int,
    ) -> Tensor:
        *leading, _, kv_len = self.given.shape
        size = (*leading, count, _ceil(kv_len, keys))
        sums = torch.zeros(size, device=self.given.query.device)
        programs = _ceil(kv_len, chosen.block_n) * sums.shape[:2].numel()
        extra = (self._visits(chosen, by_keys=True), norms, parts, count, sums)
        self._run(columns.columns_kernel, programs, extra, chosen, KEYS=keys, **sizes)
        return sums

    @property
    def shortest_part(self) -> int:
        """The fewest rows of a part: a tile meets two at most."""
        return self._config("short_columns").block_m

    @property
    def longest_part(self) -> int:
        """The most rows of a part: the sums of its tiles are added in float32."""
        return self._config("columns").block_m * LEAST_TILES

    def transposed_product(self, norms: tile.Norms, operand: Tensor) -> Tensor:
        """Return weights.mT @ operand, float32, (batch, num_heads, kv_len, width).

        Args:
            norms: the norms of the rows.
            operand: (batch, heads, q_len, width); heads may be grouped; the last stride is 1.
        """
        size = (*self.given.shape[:2], self.given.shape[-1], operand.shape[-1])
        products = self._empty(size)
        chosen = self._config("products", operand=operand)
        programs = _ceil(size[-2], chosen.block_n) * products.shape[:2].numel()
        sizes = {"OPERAND_GROUP": size[1] // operand.shape[1], "WIDTH": size[-1]}
        extra = (self._visits(chosen, by_keys=True), norms, _tokens(operand), products)
        self._run(columns.products_kernel, programs, extra, chosen, **sizes)
        return products

    def spans(self, norms: tile.Norms, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        """Return the sums of weights, (batch, num_heads, row spans, column spans).

        Args:
            norms: the norms of the rows.
            of_rows: (start, stop) of each span of queries, int64, (spans, 2), on the CPU.
            of_columns: (start, stop) of each span of keys, likewise.
        """
        chosen = self._config("pooled")
        down, across = cut_spans(of_rows, chosen.block_m), cut_spans(of_columns, chosen.block_n)
        batch, num_heads = self.given.shape[:2]
        count, height, width = len(down.table), len(of_rows), len(of_columns)
        sums = torch.zeros((batch, num_heads, count, width), device=self.given.query.device)
        placed = self._on_device(down, 2), self._on_device(across, 3)
        for groups in product(down.groups, across.groups):
            parts = [
                table[group.begin : group.end] for table, group in zip(placed, groups, strict=True)
            ]
            row_slot, column_slot = (group.slot for group in groups)
            tiles = _ceil(len(parts[0]), chosen.block_m // row_slot)
            sizes = {"ROW_SLOT": row_slot, "COLUMN_SLOT": column_slot}
            extra = (norms, *parts, *map(len, parts), sums, count, width)
            self._run(pooled.pooled_kernel, tiles * batch * num_heads, extra, chosen, **sizes)
        return sums if count == height else self._joined(sums, down.first[:-1], down.first[1:])

    def added(self, sums: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        """Return the sums of tiles, (batch, num_heads, row spans, column spans).

        Args:
            sums: (batch, num_heads, parts, tiles), contiguous.
            of_rows: the first part of each row span, and one past its last; int64, (spans, 2).
            of_columns: the first tile of each column span, and one past its last, likewise.
        """
        *leading, parts, width = sums.shape
        by_part = self._empty((*leading, parts, len(of_columns)))
        begins, ends = of_columns.int().T.contiguous().to(sums.device, non_blocking=True)
        with torch.cuda.device_of(sums):
            cast(Any, pooled.added_kernel)[(by_part.numel(),)](
                sums, begins, ends, by_part, len(of_columns), width, BLOCK=128
            )
        return self._joined(by_part, *of_rows.int().T.contiguous())

    def _joined(self, sums: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
        """Add the parts of each span of queries."""
        *leading, count, width = sums.shape
        answers = self._empty((*leading, len(begins), width))
        begins, ends = (each.to(sums.device, non_blocking=True) for each in (begins, ends))
        kernel = cast(Any, pooled.joined_kernel)
        with torch.cuda.device_of(sums):
            programs = answers.shape[:-1].numel()
            kernel[(programs,)](sums, begins, ends, answers, count, len(begins), width, BLOCK=128)
        return answers

    def row_products(
        self, norms: tile.Norms, derivative: Derivative, *, sums: bool, products: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the row sums of W G, of columns, grid and left · right, and W @ right.

        Args:
            norms: the norms of the rows.
            derivative: of a loss by the weights; without ``left``, ``right`` adds to no sum.
            sums: whether the row sums are needed, (batch, num_heads, q_len).
            products: whether the product is needed, (batch, num_heads, q_len, width).
        """
        size = self.given.shape[:-1]
        left = derivative.left if sums else None
        right = derivative.right if products or left is not None else None
        width = 1 if right is None else right.shape[-1]
        total = self._empty(size) if sums else None
        product = self._empty((*size, width)) if products else None
        chosen = self._config("row_products", operand=right)
        programs = _ceil(size[-1], chosen.block_m) * size[0] * size[1]
        terms = (_terms(derivative), _grid(derivative), _tokens(left), _tokens(right))
        extra = (self._visits(chosen), norms, *terms, total, product)
        sizes = {
            "WIDTH": width,
            "LEFT_GROUP": 1 if left is None else size[1] // left.shape[1],
            "MET": _cells_met(derivative, 1, chosen.block_n),
        }
        self._run(gradients.row_products_kernel, programs, extra, chosen, **sizes)
        return total, product

    def entries(self, norms: tile.Norms, firsts: Sequence[int], *, diagonal: bool) -> Tensor:
        """Return some weights of each row, float32, (batch, num_heads, q_len, len(firsts)).

        Args:
            norms: the norms of the rows.
            firsts: their keys.
            diagonal: the keys are those of query 0, and of query i they are i further on. Where
                there is no such key, the weight is 0.
        """
        answers = self._empty((*self.given.shape[:-1], len(firsts)))
        keys = torch.tensor(firsts, dtype=torch.int32, device="cpu")
        keys = keys.to(answers.device, non_blocking=True)
        chosen = self._config("entries")
        extra = (norms, keys, answers, len(firsts))
        programs = self._row_tiles(chosen)
        self._run(entries.entries_kernel, programs, extra, chosen, DIAGONAL=diagonal)
        return answers

    def visible_keys(self, norms: tile.Norms) -> Tensor:
        """Return the number of visible keys of each row, int32, (batch, num_heads, q_len)."""
        counts = self._empty(self.given.shape[:-1], torch.int32)
        chosen = self._config("row_products")  # it reads the same tiles
        programs = _ceil(counts.shape[-1], chosen.block_m) * counts.shape[:2].numel()
        extra = (self._visits(chosen), norms, counts)
        self._run(entries.visible_keys_kernel, programs, extra, chosen)
        return counts

    def divergence(
        self, norms: tile.Norms, other: OtherMatrix, *, shares: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums of the terms of a divergence, (batch, num_heads, q_len).

        Args:
            norms: the norms of the rows.
            other: the other matrix; its numbers are not read.
            shares: whether the sums of p log(p/m) are needed, too, of the same shape.
        """
        size = self.given.shape[:-1]
        totals = self._empty(size)
        of_first = self._empty(size) if shares else None
        chosen = self._config("divergence", other=other)
        programs = _ceil(size[-1], chosen.block_m) * size[0] * size[1]
        *other_scores_and_norms, _ = _others(other)
        extra = (norms, *other_scores_and_norms, totals, of_first)
        self._run(divergences.divergence_kernel, programs, extra, chosen, **_sizes_of_other(other))
        return totals, of_first

    def query_gradient(self, norms: tile.Norms, derivative: Derivative) -> Tensor:
        """Return the gradient of the query of the operands, float32."""
        if self._is_too_wide_for(derivative):
            return self._in_float32.query_gradient(norms, derivative)
        gradient = self._empty(self.given.query.shape)
        chosen = self._config(
            "query_gradient",
            operand=derivative.left,
            other=derivative.other,
            crowded=_crowds(derivative),
        )
        terms = (*_of_weights(derivative), _by_row(derivative))
        extra = (self._visits(chosen), norms, *terms, gradient)
        programs = _ceil(gradient.shape[-2], chosen.block_m) * gradient.shape[:2].numel()
        sizes = self._gradient_sizes(derivative, 1, chosen.block_n)
        self._run(gradients.query_gradient_kernel, programs, extra, chosen, **sizes)
        return gradient

    def key_gradient(self, norms: tile.Norms, derivative: Derivative) -> Tensor:
        """Return the gradient of the key of the operands, float32."""
        if self._is_too_wide_for(derivative):
            return self._in_float32.key_gradient(norms, derivative)
        gradient = self._empty(self.given.key.shape)
        chosen = self._config(
            "key_gradient",
            operand=derivative.left,
            other=derivative.other,
            crowded=_crowds(derivative),
        )
        sparse = self._sorted(derivative, chosen.block_n)
        visits = self._visits(chosen, by_keys=True)
        extra = (visits, norms, *_of_weights(derivative), sparse, gradient)
        programs = _ceil(gradient.shape[-2], chosen.block_n) * gradient.shape[:2].numel()
        sizes = self._gradient_sizes(derivative, 0, chosen.block_m)
        self._run(gradients.key_gradient_kernel, programs, extra, chosen, **sizes)
        return gradient

    def _is_too_wide_for(self, derivative: Derivative) -> bool:
        """Return True if the heads leave no registers for what rounding to 16 bits loses.

        Beside sparse numbers the gradient kernels keep it; see ``_with_product`` there.
        """
        query = self.given.query
        is_rounded = query.dtype != torch.float32
        return is_rounded and derivative.keys is not None and query.shape[-1] > _WIDEST_ROUNDED

    @cached_property
    def _in_float32(self) -> "Launch":
        given = self.given
        return Launch(replace(given, query=given.query.float(), key=given.key.float()))

    def bias_gradient(
        self, norms: tile.Norms, derivative: Derivative, size: torch.Size | None
    ) -> Tensor:
        """Return the gradient of the bias of the operands, float32.

        Args:
            norms: the norms of the rows.
            derivative: of a loss by the weights and the scores.
            size: that of the bias: four axes, each of full length or 1. None: it is a position
                bias, whose gradient is (batch, num_heads, q_len + kv_len), as the kernels read it.
        """
        batch, num_heads, q_len, kv_len = self.given.shape
        chosen = self._config("bias_gradient", operand=derivative.left, other=derivative.other)
        chosen = replace(chosen, block_n=chosen.block_m)  # a diagonal of tiles needs squares
        block = chosen.block_n
        down, across = _ceil(q_len, block), _ceil(kv_len, block)
        if size is None:
            gradient = self._empty((batch, num_heads, down + across - 1, 2 * block))
            shared = biases.Shared(1, 1, 1, 1)
            programs = gradient.shape[:-1].numel()
        else:
            gradient = self._empty(size)
            counts = (batch, num_heads, down, across)
            alone = [one == full for one, full in zip(size, self.given.shape, strict=True)]
            pairs = list(zip(counts, alone, strict=True))
            shared = biases.Shared(*(1 if is_alone else count for count, is_alone in pairs))
            programs = torch.Size(count if is_alone else 1 for count, is_alone in pairs).numel()
        rows, columns = gradient.shape[-2:]
        sizes = self._gradient_sizes(derivative, 1, chosen.block_n) | {
            "SUM_ROWS": rows != q_len,
            "SUM_COLUMNS": columns != kv_len,
            "DIAGONAL": size is None,
        }
        terms = (*_of_weights(derivative), _by_row(derivative), shared, rows, columns)
        self._run(biases.bias_gradient_kernel, programs, (norms, *terms, gradient), chosen, **sizes)
        if size is not None:
            return gradient
        # Neighbours among the diagonals of tiles overlap in all but one of their diagonals.
        lower, upper = gradient[..., :block], gradient[..., block:]
        joined = F.pad(lower, (0, 0, 0, 1)) + F.pad(upper, (0, 0, 1, 0))
        first = down * block - q_len
        return joined.flatten(-2)[..., first : first + q_len + kv_len]

    def _gradient_sizes(
        self, derivative: Derivative, axis: int, block: int
    ) -> dict[str, int | str]:
        left, keys = derivative.left, derivative.keys
        return {
            "WIDTH": 1 if left is None else left.shape[-1],
            "LEFT_GROUP": 1 if left is None else self.given.shape[1] // left.shape[1],
            "COUNT": 1 if keys is None else keys.shape[-1],
            "MET": _cells_met(derivative, axis, block),
            **_sizes_of_other(derivative.other),
        }

    def _sorted(self, derivative: Derivative, block_n: int) -> Sparse:
        """Return the sparse derivative of each key head, sorted by key; of equal keys by row."""
        if derivative.keys is None or derivative.numbers is None:
            return Sparse(None, None, None, None)
        batch, num_heads, q_len, kv_len = self.given.shape
        count, group = derivative.keys.shape[-1], self.given.group
        size = (batch, num_heads // group, group * q_len * count)
        keys = derivative.keys.clamp(min=0).reshape(size).int()
        keys, order = keys.sort(dim=-1, stable=True)
        numbers = derivative.numbers.reshape(size).gather(-1, order)
        edges = torch.arange(_ceil(kv_len, block_n) + 1, dtype=torch.int32, device=keys.device)
        edges = (edges * block_n).expand(*size[:2], -1).contiguous()
        first = torch.searchsorted(keys, edges, out_int32=True)
        return Sparse(keys, numbers, (order // count).int(), first)

    def _visits(
        self, chosen: Config, *, packed_rows: bool = False, by_keys: bool = False
    ) -> tile.Visits:
        """Return the tiles that each program reads, where the mask has bits."""
        packed = self.given.limits.packed
        if packed is None:
            return tile.Visits(None, None, 0, 0, 0)
        height, width = chosen.block_m, chosen.block_n
        if by_keys:
            lists = packed.by_keys(height, width)
        else:
            lists = packed.by_rows(height, width, self.given.group if packed_rows else 1)
        strides = _broadcast_strides(lists.counts)
        return tile.Visits(*lists, *strides, lists.entries.shape[-1])

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The leading arguments of every kernel."""
        given, limits = self.given, self.given.limits
        _, num_heads, q_len, kv_len = given.shape
        usual = given.bias is None and given.softcap is None
        to_bits = (given.scale if usual else 1.0) * log2(e)
        packed = limits.packed
        bits = tile.Packed(None, None, 0, 0, 0)
        if packed is not None:
            strides = _broadcast_strides(packed.slots)
            bits = tile.Packed(packed.slots, packed.words, *strides, packed.slots.shape[-1])
        return (
            _tokens(given.query),
            _tokens(given.key),
            tile.Shape(q_len, kv_len, num_heads),
            tile.Steps(given.scale, given.softcap, to_bits),
            _matrix_numbers(given.bias, q_len),
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
            bits,
        )

    def _config(
        self,
        kernel: Kernel,
        k: int = 0,
        operand: Tensor | None = None,
        other: OtherMatrix | None = None,
        *,
        crowded: bool = False,
    ) -> Config:
        if interpreted():
            return INTERPRETED
        query = self.given.query
        capability = torch.cuda.get_device_capability(query.device)
        more = (self.given.bias, self.given.softcap)
        crowded |= any(each is not None for each in more)
        widest, dtype = query.shape[-1], query.dtype
        if operand is not None:
            widest = max(widest, operand.shape[-1])
            dtype = operand.dtype if operand.dtype == torch.float32 else dtype
        if other is not None:
            widest = max(widest, other.given.query.shape[-1])
            dtype = torch.promote_types(dtype, other.given.query.dtype)
            crowded |= other.given.bias is not None or other.given.softcap is not None
        packed = self.given.limits.packed is not None
        return config(
            kernel,
            widest,
            dtype,
            capability,
            k=k,
            crowded=crowded,
            packed=packed,
            compared=None if other is None else other.kind,
        )

    def _row_tiles(self, chosen: Config) -> int:
        batch, num_heads, q_len, _ = self.given.shape
        kv_heads = self.given.key.shape[1]
        return _ceil(num_heads // kv_heads * q_len, chosen.block_m) * batch * kv_heads

    def _run(
        self, kernel: Any, programs: int, extra: tuple[Any, ...], chosen: Config, **sizes: int | str
    ) -> None:
        query = self.given.query
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        with torch.cuda.device_of(query):
            kernel[(programs,)](
                *self.arguments,
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

    def _on_device(self, parts: _PartsOfSpans, into: int) -> Tensor:
        """Return (start, length, target, opens) of each part on the device, (parts, 4).

        Each part takes 16 bytes, so that every group of parts starts at an aligned address.

        Args:
            parts: the parts of all spans.
            into: the column of the table that holds the index of the sum.
        """
        return parts.table[:, [0, 1, into, 4]].to(self.given.query.device, non_blocking=True)


def joined_parts(sums: Tensor) -> Tensor:
    """Return the column sums of tiles of one key, (batch, num_heads, kv_len)."""
    return sums.sum(-2, dtype=torch.float64).float()


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Return the strides of the batch and the heads."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _broadcast_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Return the strides of the batch and the heads; 0 where all entries share one."""
    batch, heads = _strides(tensor)
    if tensor is None:
        return batch, heads
    return batch * (tensor.shape[0] > 1), heads * (tensor.shape[1] > 1)


def _terms(derivative: Derivative) -> Terms:
    """Return the terms of one number for each row or key, as the kernels read them."""
    slope = derivative.slope
    slope = None if slope is None else slope * log(2)  # the kernels' logarithms are in bits
    return Terms(slope, derivative.offset, derivative.columns)


def _grid(derivative: Derivative) -> Grid:
    """Return the cells of a derivative as the kernels read them."""
    grid = derivative.grid
    if grid is None:
        return Grid(None, None, None, 0, 0)
    return Grid(grid.numbers, *grid.places, *grid.numbers.shape[-2:])


def _of_weights(derivative: Derivative) -> tuple[Any, ...]:
    """Return the arguments that make up the derivative by the weights."""
    products = _tokens(derivative.left), _tokens(derivative.right)
    return _terms(derivative), _grid(derivative), *products, *_others(derivative.other)


def _others(other: OtherMatrix | None) -> tuple[Any, ...]:
    """Return the arguments of the other matrix of a divergence: its scores, norms and numbers."""
    if other is None:
        return (None,) * 8
    query, key, _, *more = Launch(other.given).arguments
    return query, key, *more, tile.Norms(*other.norms), other.numbers


def _sizes_of_other(other: OtherMatrix | None) -> dict[str, int | str]:
    if other is None:
        return {"OTHER_GROUP": 1, "OTHER_DIM": 1, "KIND": ""}
    dim = other.given.query.shape[-1]
    return {"OTHER_GROUP": other.given.group, "OTHER_DIM": dim, "KIND": other.kind}


def _by_row(derivative: Derivative) -> Sparse:
    """Return the sparse derivative of each row; entries without a key have the number 0."""
    if derivative.keys is None or derivative.numbers is None:
        return Sparse(None, None, None, None)
    keys = derivative.keys.clamp(min=0).int().contiguous()
    return Sparse(keys, derivative.numbers.contiguous(), None, None)


def _crowds(derivative: Derivative) -> bool:
    """Return True if the terms of a derivative take many registers: a product, or several cells."""
    several = any(_cells_met(derivative, axis, 128) != 1 for axis in (0, 1))
    return several or derivative.left is not None


def _cells_met(derivative: Derivative, axis: int, block: int) -> int:
    """Return how many cells of the grid a tile of this many tokens meets: 1, 2, or 0 for more."""
    if derivative.grid is None:
        return 1
    spans, length = derivative.grid.spans[axis], len(derivative.grid.places[axis])
    if not bool((spans[spans < length] % block).any()):
        return 1
    edges = torch.cat((spans[:, 0], spans[-1:, 1]))
    covers = torch.equal(spans[1:, 0], spans[:-1, 1]) and edges[0] == 0 and edges[-1] == length
    return 2 if covers and int(edges.diff().min()) >= block - 1 else 0


def _tokens(tensor: Tensor | None) -> tile.Tokens:
    if tensor is None:
        return tile.Tokens(None, 0, 0, 0)
    return tile.Tokens(tensor, *_strides(tensor), tensor.stride(2))


def _matrix_numbers(given: MatrixNumbers | None, q_len: int) -> tile.MatrixNumbers:
    if given is None:
        return tile.MatrixNumbers(None, 0, 0, 0, 0)
    numbers = given.numbers
    if given.diagonal:
        return tile.MatrixNumbers(numbers[..., q_len - 1 :], *_strides(numbers), -1, 1)
    return tile.MatrixNumbers(numbers, *_strides(numbers), numbers.stride(2), numbers.stride(3))


def _ceil(number: int, step: int) -> int:
    return -(-number // step)


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def spans_between(edges: Tensor) -> Tensor:
    """Return the (start, stop) of the spans that lie between positions, int64, (spans, 2)."""
    rising = cast(Tensor, torch.unique(edges))
    return torch.stack((rising[:-1], rising[1:]), -1)


def parts_of(spans: Tensor, most: int) -> Tensor:
    """Cut spans that follow each other into parts of nearly equal length, in their order.

    Args:
        spans: (start, stop), int64, (spans, 2).
        most: the largest number of tokens in a part.

    Returns:
        (start, stop) of each part, int64, (parts, 2).
    """
    start = cut_spans(spans, most).table[:, 0].long().sort().values
    return torch.stack((start, torch.cat((start[1:], spans[-1:, 1]))), -1)


def cut_spans(spans: Tensor, block: int) -> _PartsOfSpans:
    """Cut each span into parts of nearly equal length, each at most a block long.

    Args:
        spans: (start, stop), int64, (spans, 2).
        block: the largest number of tokens in a part.
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
    # All parts of a span use slots of one width.
    slots = [*(width for width in NARROW if width < block), block]
    slot = torch.searchsorted(torch.tensor(slots, device="cpu"), -(-lengths[span] // counts[span]))
    ends = [int((slot <= place).sum()) for place in range(len(slots))]
    groups = [
        _Group(width, begin, end)
        for width, begin, end in zip(slots, [0, *ends[:-1]], ends, strict=True)
        if begin < end
    ]
    return _PartsOfSpans(table[slot.argsort(stable=True)].int(), groups, first.int())
