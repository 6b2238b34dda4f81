"""Masks of FlexAttention: its mask_mod callables and its BlockMask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from regard.errors import shape_text
from regard.masks.block_mask import EMPTY, FULL, PARTIAL
from regard.masks.key_bounds import KeyBounds
from regard.masks.lengths import fits
from regard.masks.mask import Mask, PointMask, pick
from regard.scores.box import Box, broadcast_index
from regard.scores.flex_callable import MASK_MOD, FlexCallable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BlockSparse", "MaskMod", "flex_mask"]


def flex_mask(mask: object) -> Mask | None:
    """The mask of a BlockMask or of a mask_mod; None of anything else."""
    from torch.nn.attention.flex_attention import BlockMask  # few need it

    if isinstance(mask, BlockMask):
        return BlockSparse.of(mask)
    return MaskMod(cast(PointMask, mask)) if callable(mask) else None


@dataclass(frozen=True, eq=False, repr=False)
class MaskMod(Mask):
    """A mask_mod of FlexAttention: ``function(b, h, q_idx, kv_idx)`` says who may attend.

    A function given as ``mask=`` becomes one; written out it combines with ``&``, ``|`` and ``~``.
    As in FlexAttention the four arguments are scalar tensors, plain indices: q_idx counts from the
    first query, and nothing is aligned at the end when q_len and kv_len differ. b is the index in
    the batch (counted through, if there are several batch axes), h the head; both are 0 for axes
    that the matrix lacks, and a part of a matrix keeps those of the whole.

    A function tells nothing of the columns it allows, so every key is tried; to skip work, combine
    it with a mask that knows, as in the example, or pass a BlockMask.

    Args:
        function: four scalar tensors to a scalar bool tensor, True = may attend. It runs under
            ``torch.vmap``: no ``if`` on tensors. Tensors that it uses stay on their device.

    Raises:
        TypeError: it is no such function. (At ``attend``: the function is tried out there.)
        ValueError: it fails, or returns more than one bool.

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

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return MaskMod(_fitted(self.function, shape, device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        if isinstance(self.function, FlexCallable):
            return MaskMod(self.function.map(function))
        return self

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        return KeyBounds(slice(0, shape[-1]), slice(0, 0))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return _distinct(_fitted(self.function, shape, device)(box))

    def mask_mod(self, shape: torch.Size) -> PointMask:
        return _pointwise(self.function)

    @property
    def text(self) -> str:
        return f"MaskMod({_name(self.function)})"


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Mask):
    """A BlockMask of FlexAttention: what may be attended to, block by block.

    As in FlexAttention's kernels, nobody attends in a block that is not listed, everybody in a
    full one, and the mask_mod is asked in the others.

    Attributes:
        function: the mask_mod.
        grid: EMPTY, PARTIAL or FULL for each block, (batch, num_heads, row blocks, column blocks);
            of a bound mask with the leading axes of its matrix, each full or 1.
        lengths: q_len and kv_len.
        block_size: rows and columns of a block.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> block_mask = regard.Causal().to_block_mask(3, 3)
        >>> regard.attend(x, x, mask=block_mask).to_dense()
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """

    function: PointMask | FlexCallable
    grid: Tensor
    lengths: tuple[int, int]
    block_size: tuple[int, int]

    @classmethod
    def of(cls, block_mask: "BlockMask") -> "BlockSparse":
        """The mask that a BlockMask is."""
        (q_len, kv_len), (height, width) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
        size = (-(-q_len // height), -(-kv_len // width))
        grid = PARTIAL * _listed(block_mask.kv_num_blocks, block_mask.kv_indices, size)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, size)
            grid = torch.where(full.bool(), FULL, grid)
        four_axes = grid[(None,) * (4 - grid.ndim)]
        block_size = (min(height, q_len), min(width, kv_len))
        return cls(block_mask.mask_mod, four_axes, (q_len, kv_len), block_size)

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        if self.lengths != shape[-2:]:
            raise ValueError(
                f"mask is a BlockMask of q_len {self.lengths[0]} and kv_len {self.lengths[1]}; "
                f"those of the matrix are {shape[-2]} and {shape[-1]}.\n"
                "    Make another with create_block_mask, or pass its mask_mod as mask=."
            )
        blocks = self.grid.shape[-2:]
        grid = self.grid.to(device)
        if not fits(grid, (*shape[:-2], *blocks)):
            batch, num_heads = grid.shape[:-2] if grid.ndim == 4 else (0, 0)
            of_matrix = (prod(shape[:-3]), prod(shape[-3:-2]))
            if batch not in (1, of_matrix[0]) or num_heads not in (1, of_matrix[1]):
                raise ValueError(
                    f"mask is a BlockMask of shape {self._shape_text}; it must broadcast to "
                    f"(batch, num_heads, q_len, kv_len), {shape_text((*of_matrix, *shape[-2:]))}.\n"
                    "    Its batch and num_heads may be 1."
                )
            batch_axes = shape[:-3] if batch > 1 else (1,) * len(shape[:-3])
            heads = (num_heads,) if len(shape) > 2 else ()
            grid = grid.reshape(*batch_axes, *heads, *blocks)
        function = _fitted(self.function, shape, device)
        return BlockSparse(function, grid, self.lengths, self.block_size)

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        mask_mod = self.function
        if isinstance(mask_mod, FlexCallable):
            mask_mod = mask_mod.map(function)
        return BlockSparse(mask_mod, function(self.grid), self.lengths, self.block_size)

    @cached_property
    def _read(self) -> Tensor:
        """The grid on the CPU: a device is waited for once, not for every block."""
        return self.grid.cpu()

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        (height, width), kv_len = self.block_size, shape[-1]
        part = broadcast_index(self._read, leading)[
            ..., rows.start // height : -(-rows.stop // height), :
        ]
        part = part.flatten(0, -2)
        listed = cast(list[bool], (part.amax(0) != EMPTY).tolist())
        if not any(listed):
            return KeyBounds(slice(0, 0), slice(0, 0))
        hull = (listed.index(True), len(listed) - listed[::-1].index(True))
        full = _longest_run(cast(list[bool], (part.amin(0) == FULL).tolist()))
        some, every = (
            slice(start * width, min(stop * width, kv_len)) for start, stop in (hull, full)
        )
        return KeyBounds(some, every)

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        height, width = self.block_size
        rows = slice(box.rows.start // height, -(-box.rows.stop // height))
        columns = slice(box.columns.start // width, -(-box.columns.stop // width))
        kinds = broadcast_index(self.grid, box.leading)[..., rows, columns]
        top, left = box.rows.start - rows.start * height, box.columns.start - columns.start * width
        inside = (
            ...,
            slice(top, top + box.rows.stop - box.rows.start),
            slice(left, left + box.columns.stop - box.columns.start),
        )
        full, partial = (
            _enlarged(kinds == kind, self.block_size)[inside] for kind in (FULL, PARTIAL)
        )
        return full | (partial & _distinct(_fitted(self.function, shape, device)(box)))

    def mask_mod(self, shape: torch.Size) -> PointMask:
        grid, (height, width) = self.grid, self.block_size
        allowed = _pointwise(self.function)

        def in_block(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            kind = pick(grid, b, h, q_idx // height, kv_idx // width)
            return (kind == FULL) | ((kind == PARTIAL) & allowed(b, h, q_idx, kv_idx))

        return in_block

    @property
    def text(self) -> str:
        return f"BlockMask({_name(self.function)}, {self._shape_text})"

    @property
    def _shape_text(self) -> str:
        return shape_text((*self.grid.shape[:-2], *self.lengths))


def _fitted(
    function: PointMask | FlexCallable, shape: torch.Size, device: torch.device
) -> FlexCallable:
    """A mask_mod fitted to a matrix; one that was fitted to another may not fit this one."""
    if not isinstance(function, FlexCallable):
        return FlexCallable.fitted(function, MASK_MOD, shape, device)
    for numbers in (function.batch, function.head):
        if not fits(numbers, (*shape[:-2], 1, 1)):
            raise ValueError(
                f"mask has the {function} of another matrix; it does not fit one of shape "
                f"{shape_text(shape)}.\n    Pass the mask_mod itself."
            )
    return function


def _pointwise(function: PointMask | FlexCallable) -> PointMask:
    """A mask_mod on the b and h of a matrix of four axes, which may be a part of another."""
    if not isinstance(function, FlexCallable):
        return function
    # A part of another matrix may have that one's batch where it has its own heads.
    batch, head = cast(
        tuple[Tensor, Tensor],
        torch.broadcast_tensors(function.batch[..., 0, 0], function.head[..., 0, 0]),
    )
    mask_mod = function.function
    return lambda b, h, q_idx, kv_idx: mask_mod(pick(batch, b, h), pick(head, b, h), q_idx, kv_idx)


def _name(function: PointMask | FlexCallable) -> str:
    function = function.function if isinstance(function, FlexCallable) else function
    return str(getattr(function, "__name__", type(function).__name__))


def _distinct(tensor: Tensor) -> Tensor:
    """The tensor with an axis of 1 in place of one that repeats the same numbers."""
    kept = tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())
    return tensor[kept]


def _enlarged(blocks: Tensor, block_size: tuple[int, int]) -> Tensor:
    """Each entry of (..., row blocks, column blocks) as often as its block has keys."""
    height, width = block_size
    *leading, rows, columns = blocks.shape
    many = blocks[..., :, None, :, None].expand(*leading, rows, height, columns, width)
    return many.reshape(*leading, rows * height, columns * width)


def _listed(counts: Tensor, indices: Tensor, size: tuple[int, int]) -> Tensor:
    """1 for each block that is listed, in a grid of this size: (..., row blocks, column blocks)."""
    counts, indices = counts[..., : size[0]], indices[..., : size[0], :].long()
    places = torch.arange(indices.shape[-1], device=indices.device)
    real = (places < counts[..., None]) & (indices < size[1])
    grid = torch.zeros(*indices.shape[:-1], size[1] + 1, dtype=torch.uint8, device=indices.device)
    return grid.scatter(-1, torch.where(real, indices, size[1]), 1)[..., :-1]


def _longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    """The start and the stop of the longest run of True."""
    runs, start = [(0, 0)], 0
    for flag, group in groupby(flags):
        stop = start + len(list(group))
        if flag:
            runs.append((start, stop))
        start = stop
    return max(runs, key=lambda run: run[1] - run[0])
