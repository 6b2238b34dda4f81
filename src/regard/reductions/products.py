"""Products with the matrix, and tiles of it, as reductions."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from regard.errors import check_floating, check_operand
from regard.masks import Mask
from regard.reductions.block import RowStatistics
from regard.reductions.masked_product import operand_width
from regard.reductions.needs import Needs
from regard.reductions.reduction import Contribution, Reduction
from regard.reductions.template import split
from regard.scores.autocast import without_autocast
from regard.scores.box import Box, as_slice, cut_whole, length
from regard.scores.score_source import Scores

_SCORES_AT_ONCE = 2**21
_NO_GRAPH = "regard computes scores again for their gradients"


@final
@dataclass(frozen=True, eq=False)
class Output(Reduction):
    """weights @ value, the output of an attention layer.

    The answer has shape (..., num_heads, q_len, value_dim) and the dtype of the value. It equals
    ``A @ value``; as a reduction it shares a pass with other reductions.

    Args:
        value: (..., num_kv_heads, kv_len, value_dim), or (kv_len,) for one number per key. Leading
            axes broadcast; heads may be grouped. NaN or infinity in the value of a key reaches only
            the rows that may attend to that key; docs/numerics.md has the exceptions.

    Raises:
        TypeError: the value is not a floating tensor.
        ValueError: the value does not fit the matrix.

    Example:
        >>> import torch, regard
        >>> A = regard.attend(torch.zeros(1, 1), torch.zeros(2, 1))
        >>> A.reduce(regard.Output(torch.tensor([[1.0], [3.0]])))
        tensor([[2.]])
    """

    thread_safe = True
    by_heads = by_rows = True

    value: Tensor

    def __post_init__(self) -> None:
        check_floating("value", self.value, "(..., num_kv_heads, kv_len, value_dim)")

    @property
    def needs(self) -> Needs:
        return Needs(values=(self.value,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.value,)

    def check(self, shape: torch.Size, device: torch.device) -> None:
        """Raise an error if the value does not fit a matrix of this shape.

        Raises:
            ValueError: the value's length, number of heads or device does not match.
        """
        check_operand("value", self.value, "kv_len", (*shape[:-2], shape[-1]), device)

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        self.check(shape, device)
        return (torch.zeros((*shape[:-1], operand_width(self.value)), dtype=dtype, device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        return (Contribution(block.box.at_rows, block.product(self.value)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return _as_operand(buffers[0], self.value)


@final
@dataclass(frozen=True, eq=False)
class TransposedOutput(Reduction):
    """weights transposed @ operand, for ``A.T @ x``: (..., num_heads, kv_len, value_dim).

    Args:
        operand: (..., num_heads, q_len, value_dim) or (q_len,); leading axes broadcast.
    """

    thread_safe = True
    by_heads = True

    operand: Tensor

    @property
    def needs(self) -> Needs:
        return Needs(operands=(self.operand,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.operand,)

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        check_operand("operand", self.operand, "q_len", shape[:-1], device)
        size = (*shape[:-2], shape[-1], operand_width(self.operand))
        return (torch.zeros(size, dtype=dtype, device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        return (Contribution(block.box.at_columns, block.transposed_product(self.operand)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return _as_operand(buffers[0], self.operand)


def _as_operand(total: Tensor, operand: Tensor) -> Tensor:
    total = total.to(operand.dtype)
    return total.squeeze(-1) if operand.ndim == 1 else total


@final
@dataclass(frozen=True)
class WeightTile(Reduction):
    """The weights at some rows and columns: (..., num_heads, rows, columns).

    Args:
        at_rows: the queries, in rising order.
        at_columns: the keys, in rising order.
    """

    thread_safe = True
    by_heads = True

    at_rows: range
    at_columns: range

    @property
    def needs(self) -> Needs:
        return Needs(tiles=(self.at_columns,))

    def rows(self, q_len: int) -> range:
        return self.at_rows

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        size = (*shape[:-2], len(self.at_rows), len(self.at_columns))
        return (torch.zeros(size, dtype=dtype, device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        rows, in_block_rows = intersect(self.at_rows, block.box.rows)
        columns, in_block_columns = intersect(self.at_columns, block.box.columns)
        values = block.tile(in_block_rows, in_block_columns)
        return (Contribution((*block.box.leading, rows, columns), values),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


def intersect(entries: range, part: slice) -> tuple[slice, slice]:
    """Return the positions, in the range and in the part, of the entries that lie in both.

    If the part has a step, it is that of the entries.
    """
    first = max(0, -(-(part.start - entries.start) // entries.step))
    stop = min(len(entries), max(0, -(-(part.stop - entries.start) // entries.step)))
    if first >= stop:
        return slice(0, 0), slice(0, 0)
    step = part.step or 1
    start, last = ((entries[n] - part.start) // step for n in (first, stop - 1))
    return slice(first, stop), slice(start, last + 1, entries.step // step)


def scores_at(source: Scores, mask: Mask | None, at_rows: range, at_columns: range) -> Tensor:
    """Return the scores at some rows and columns, in the dtype of the inputs; -inf if masked.

    The scores are computed a few rows at a time. Those between the steps of a range of columns are
    discarded.
    """
    shape = source.shape
    if not (at_rows and at_columns):
        size = (*shape[:-2], len(at_rows), len(at_columns))
        return torch.zeros(size, dtype=source.dtype, device=source.device)
    leading = tuple(slice(0, n) for n in shape[:-2])
    columns = slice(at_columns[0], at_columns[-1] + 1)
    height = max(1, _SCORES_AT_ONCE // (prod(shape[:-2]) * length(columns)))

    def part(rows: range, masked: tuple[Scores, Mask | None]) -> Tensor:
        source, mask = masked
        box = Box(leading, as_slice(rows), columns)
        with without_autocast(source.device):
            scores = source.block(box, cut_whole)
        if mask is not None:
            allowed = mask.block(box, shape, source.device)
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores[..., :: at_columns.step].to(source.dtype)

    parts = [at_rows[first : first + height] for first in range(0, len(at_rows), height)]
    masked = (source, mask)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in source.tensors):
        # checkpoint loads PyTorch's compiler, which is slow
        return torch.cat([part(rows, masked) for rows in parts], -2)
    if torch.compiler.is_compiling():
        # Graphs would depend on the identity of each tensor.
        outside: Any = torch.compiler.disable(scores_at, reason=_NO_GRAPH)
        return outside(source, mask, at_rows, at_columns)
    template, tensors = split(masked)

    def filled(rows: range, *tensors: Tensor) -> Tensor:
        return part(rows, template.filled(tensors))

    # Autograd would store the skipped rows, too, so the backward pass recomputes each part.
    recomputed = partial(cast(Any, checkpoint), use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recomputed(filled, rows, *tensors) for rows in parts], -2)
