"""A mask as the BlockMask of FlexAttention, block by block."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.scores.box import Box

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from regard.masks.mask import Mask

__all__ = ["EMPTY", "FULL", "PARTIAL", "block_mask_of"]

EMPTY, PARTIAL, FULL = 0, 1, 2
"""The kinds of blocks: no query attends, the mask_mod decides, every query may attend."""

_MAX_NUMBERS = 2**22  # of the mask, evaluated at once


def block_mask_of(
    mask: "Mask", shape: torch.Size, device: torch.device, block_size: int
) -> "BlockMask":
    """Return the BlockMask of a mask bound to (batch, num_heads, q_len, kv_len)."""
    from torch.nn.attention.flex_attention import BlockMask  # few need it

    q_len, kv_len = shape[-2:]
    leading = (slice(0, shape[0]), slice(0, shape[1]))
    corner = mask.block(Box(leading, slice(0, 1), slice(0, 1)), shape, device)
    distinct = (1, 1, *corner.shape[:-2])[-2:]  # batch or 1, num_heads or 1
    blocks = (-(-q_len // block_size), -(-kv_len // block_size))
    grid = torch.full((*distinct, *blocks), EMPTY, device=device)
    step = max(1, _MAX_NUMBERS // (shape[0] * shape[1] * block_size**2))
    for row in range(blocks[0]):
        rows = slice(row * block_size, min((row + 1) * block_size, q_len))
        some, every = mask.key_bounds(leading, rows, shape)
        first, last = some.start // block_size, -(-some.stop // block_size)
        full = slice(-(-every.start // block_size), every.stop // block_size)
        if full.start >= full.stop or rows.stop - rows.start < block_size:
            full = slice(last, last)  # a block that the edge of the matrix cuts is never full
        grid[..., row, full] = FULL
        for start, stop in ((first, full.start), (full.stop, last)):
            for at in range(start, stop, step):
                end = min(at + step, stop)
                box = Box(leading, rows, slice(at * block_size, min(end * block_size, kv_len)))
                grid[..., row, at:end] = _kinds(mask.block(box, shape, device), box, block_size)
    return BlockMask.from_kv_blocks(
        *_listed(grid == PARTIAL),
        *_listed(grid == FULL),
        BLOCK_SIZE=block_size,
        mask_mod=mask.mask_mod(shape),
        seq_lengths=(q_len, kv_len),
    )


def _kinds(allowed: Tensor, box: Box, block_size: int) -> Tensor:
    """Return the kind of each block of a row of blocks, (..., blocks), from its part of a mask."""
    height, width = box.rows.stop - box.rows.start, box.columns.stop - box.columns.start
    allowed = allowed.expand(*allowed.shape[:-2], height, width)
    padded = F.pad(allowed, (0, -width % block_size, 0, block_size - height))
    blocks = padded.reshape(*padded.shape[:-1], -1, block_size)  # (..., rows, blocks, columns)
    return blocks.any(-1).any(-2).long() + blocks.all(-1).all(-2)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row are chosen, and all blocks with the chosen ones first."""
    indices = chosen.byte().sort(dim=-1, descending=True, stable=True).indices
    return chosen.sum(-1, dtype=torch.int32), indices.int()
