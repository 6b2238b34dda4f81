"""Masks of FlexAttention: its mask_mod callables and its BlockMask."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Self, cast, final

import torch
from torch import Tensor

from regard.errors import shape_text
from regard.masks.mask import (
    EMPTY,
    FULL,
    NO_KEYS,
    PARTIAL,
    KeyBounds,
    Mask,
    PointMask,
    Points,
    fits,
    length,
    without_repeats,
)
from regard.scores.box import Box, broadcast_index
from regard.scores.flex_callable import MASK_MOD, FlexCallable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@final
@dataclass(frozen=True, eq=False, repr=False)
class MaskMod(Mask):
    """A mask_mod of FlexAttention: ``function(b, h, q_idx, kv_idx)`` returns True = may attend.

    A function passed as ``mask=`` is converted to a MaskMod. Write MaskMod yourself to combine a
    function with other masks by ``&``, ``|`` and ``~``. As in FlexAttention, the four arguments are
    scalar tensors. q_idx counts from the first query and kv_idx from the first key, even if q_len
    and kv_len differ. b is the batch index; several batch axes are numbered as if flattened. h is
    the head index. b or h is 0 if the matrix has no such axis. A part of a matrix passes the b and
    h of the whole matrix.

    The function is evaluated for every key. To save work, combine it with a mask such as
    ``Causal``, whose bounds are known in advance, or pass a BlockMask.

    Args:
        function: takes four scalar tensors and returns a scalar bool tensor, True = may attend. It
            runs under ``torch.vmap``, so it must not use ``if`` on tensors. Tensors that it uses
            stay on their device.

    Raises:
        TypeError: the function takes other arguments, or its result is not of dtype bool.
        ValueError: the function raises an error, does not return a scalar tensor, or uses a tensor
            that requires a gradient. ``attend`` makes a trial call to check this.

    Example:
        >>> import torch, regard
        >>> document = torch.tensor([0, 0, 1, 1])
        >>> def same_document(b, h, q_idx, kv_idx):
        ...     return document[q_idx] == document[kv_idx]
        >>> x = torch.zeros(4, 1)
        >>> A = regard.attend(x, x, mask=regard.MaskMod(same_document) & regard.Causal())
        >>> A.to_dense()
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]])
    """

    function: PointMask | FlexCallable

    def bind(self, shape: torch.Size, device: torch.device) -> Self:
        function, axes = self.function, (*shape[:-2], 1, 1)
        if not isinstance(function, FlexCallable):
            return type(self)(FlexCallable.fitted(function, MASK_MOD, shape, device))
        if not (fits(function.batch, axes) and fits(function.head, axes)):
            raise ValueError(
                f"mask has {self.name} bound to another matrix; it does not fit the shape "
                f"{shape_text(shape)}.\n    Pass the original mask_mod."
            )
        return self

    def allows(self, points: Points) -> Tensor:
        function, (*leading, rows, columns) = cast(FlexCallable, self.function), points.places
        if isinstance(rows, slice):
            box = Box(*cast("tuple[tuple[slice, ...], slice, slice]", (leading, rows, columns)))
            return without_repeats(function(box))
        b, h = points.read(function.batch), points.read(function.head)
        return function.function(b, h, rows, columns)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        return KeyBounds(slice(0, shape[-1]), NO_KEYS)

    @property
    def name(self) -> str:
        """The name of the function, or of its class."""
        function: object = self.function
        if isinstance(function, FlexCallable):
            function = function.function
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def text(self) -> str:
        return f"MaskMod({self.name})"


@final
@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Mask):
    """A BlockMask of FlexAttention.

    The blocks have the same meaning as in FlexAttention's kernels. A block that is not listed is
    fully masked, a full block is fully allowed, and the mask_mod decides in the other blocks.

    Attributes:
        mask: the mask_mod, which decides in the partial blocks.
        grid: EMPTY, PARTIAL or FULL for each block, (batch, num_heads, row blocks, column blocks).
            A bound mask has the leading axes of its matrix instead, each of full length or 1.
        lengths: q_len and kv_len.
        block_size: the height and width of a block.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> block_mask = regard.Causal().to_block_mask(3, 3)
        >>> regard.attend(x, x, mask=block_mask).to_dense()
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """

    mask: MaskMod
    grid: Tensor
    lengths: tuple[int, int]
    block_size: tuple[int, int]

    @classmethod
    def of(cls, block_mask: "BlockMask") -> Self:
        """Return the mask of a BlockMask."""
        (q_len, kv_len), (height, width) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
        size = (-(-q_len // height), -(-kv_len // width))
        grid = PARTIAL * _listed(block_mask.kv_num_blocks, block_mask.kv_indices, size)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, size)
            grid = torch.where(full.bool(), FULL, grid)
        four_axes = grid[(None,) * (4 - grid.ndim)]
        block_size = (min(height, q_len), min(width, kv_len))
        return cls(MaskMod(block_mask.mask_mod), four_axes, (q_len, kv_len), block_size)

    def bind(self, shape: torch.Size, device: torch.device) -> Self:
        if self.lengths != shape[-2:]:
            raise ValueError(
                f"mask is a BlockMask of q_len {self.lengths[0]} and kv_len {self.lengths[1]}; "
                f"the matrix has q_len {shape[-2]} and kv_len {shape[-1]}.\n"
                "    Use create_block_mask with these lengths, or pass the mask_mod as mask=."
            )
        grid = self.grid.to(device)
        if not fits(grid, (*shape[:-2], *grid.shape[-2:])):
            of_matrix = (prod(shape[:-3]), prod(shape[-3:-2]))
            if not fits(grid, (*of_matrix, *grid.shape[-2:])):
                raise ValueError(
                    f"mask is a BlockMask of shape {self._shape_text}; it must broadcast to "
                    f"(batch, num_heads, q_len, kv_len), {shape_text((*of_matrix, *shape[-2:]))}.\n"
                    "    Its batch and num_heads may be 1."
                )
            batch = shape[:-3] if grid.shape[0] > 1 else (1 for _ in shape[:-3])
            grid = grid.reshape(*batch, *(grid.shape[1:] if len(shape) > 2 else grid.shape[2:]))
        return type(self)(self.mask.bind(shape, device), grid, self.lengths, self.block_size)

    def allows(self, points: Points) -> Tensor:
        (height, width), (*leading, rows, _) = self.block_size, points.places
        row_block, column_block = points.q_idx // height, points.kv_idx // width
        if isinstance(rows, slice):  # columns first: several times as fast as both at once
            top = rows.start // height
            tall = slice(top, -(-rows.stop // height))
            part = broadcast_index(self.grid, (*leading, tall)).index_select(-1, column_block)
            kind = part.index_select(-2, row_block[:, 0] - top)
        else:
            kind = broadcast_index(self.grid, (*leading, row_block, column_block))
        return kind + self.mask.allows(points) >= FULL  # PARTIAL and True add up to FULL

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        (height, width), kv_len = self.block_size, shape[-1]
        row_blocks = slice(rows.start // height, -(-rows.stop // height))
        kinds = broadcast_index(self._on_cpu, leading)[..., row_blocks, :].flatten(0, -2)
        listed, full = _runs(kinds.amax(0) != EMPTY), _runs(kinds.amin(0) == FULL)

        def keys(first: slice, last: slice) -> slice:
            return slice(first.start * width, min(last.stop * width, kv_len))

        every = max(full, key=length, default=NO_KEYS)
        return KeyBounds(keys(listed[0], listed[-1]) if listed else NO_KEYS, keys(every, every))

    @cached_property
    def _on_cpu(self) -> Tensor:
        """The grid on the CPU, copied once and not for every block."""
        return self.grid.cpu()

    @property
    def text(self) -> str:
        return f"BlockMask({self.mask.name}, {self._shape_text})"

    @property
    def _shape_text(self) -> str:
        return shape_text((*self.grid.shape[:-2], *self.lengths))


def _listed(counts: Tensor, indices: Tensor, size: tuple[int, int]) -> Tensor:
    """Return 1 for each listed block in a grid of this size, (..., row blocks, column blocks)."""
    counts, indices = counts[..., : size[0]], indices[..., : size[0], :].long()
    places = torch.arange(indices.shape[-1], device=indices.device)
    real = (places < counts[..., None]) & (indices < size[1])
    grid = torch.zeros(*indices.shape[:-1], size[1] + 1, dtype=torch.uint8, device=indices.device)
    return grid.scatter(-1, torch.where(real, indices, size[1]), 1)[..., :-1]


def _runs(flags: Tensor) -> list[slice]:
    """Return the runs of True in a vector of bools."""
    padded = torch.nn.functional.pad(flags, (1, 1))
    edges = cast(list[int], (padded[1:] != padded[:-1]).nonzero().flatten().tolist())
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
