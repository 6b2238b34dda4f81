"""A mask as the BlockMask of FlexAttention, block by block."""

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.scores.box import Box

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from regard.masks.mask import Mask

__all__ = ["EMPTY", "FULL", "PARTIAL", "block_mask_of"]

EMPTY, PARTIAL, FULL = 0, 1, 2
"""What a block of a BlockMask is: nobody attends, ask the mask_mod, everybody may attend."""

_AT_ONCE = 2**22


def block_mask_of(
    mask: "Mask", shape: torch.Size, device: torch.device, block_size: int
) -> "BlockMask":
    """The BlockMask of a bound mask; shape is (batch, num_heads, q_len, kv_len)."""
    from torch.nn.attention.flex_attention import BlockMask  # few need it

    q_len, kv_len = shape[-2:]
    starts = range(0, q_len, block_size)
    tiles = [slice(start, min(start + block_size, q_len)) for start in starts]
    rows = [_row_of_blocks(mask, tile, shape, device, block_size) for tile in tiles]
    grid = torch.stack(cast(list[Tensor], torch.broadcast_tensors(*rows)), -2)
    return BlockMask.from_kv_blocks(
        *_listed(grid == PARTIAL),
        *_listed(grid == FULL),
        BLOCK_SIZE=block_size,
        mask_mod=mask.mask_mod(shape),
        seq_lengths=(q_len, kv_len),
    )


def _row_of_blocks(
    mask: "Mask", rows: slice, shape: torch.Size, device: torch.device, block_size: int
) -> Tensor:
    """What each block of these rows is, (batch or 1, num_heads or 1, blocks)."""
    leading, kv_len = (slice(0, shape[0]), slice(0, shape[1])), shape[-1]
    columns = mask.key_bounds(leading, rows, shape)
    first, last = columns.any.start // block_size, -(-columns.any.stop // block_size)
    full = slice(-(-columns.all.start // block_size), columns.all.stop // block_size)
    if full.start >= full.stop or rows.stop - rows.start < block_size:
        full = slice(last, last)  # a block that the edge of the matrix cuts is never full
    step = max(1, _AT_ONCE // (shape[0] * shape[1] * block_size**2))
    parts = [torch.full((1, 1, first), EMPTY, device=device)]
    for start, stop in ((first, full.start), (full.stop, last)):
        for block in range(start, stop, step):
            end = min((block + step) * block_size, stop * block_size, kv_len)
            box = Box(leading, rows, slice(block * block_size, end))
            parts.append(_kinds(mask.block(box, shape, device), box, block_size))
        if start == first:
            parts.append(torch.full((1, 1, full.stop - full.start), FULL, device=device))
    parts.append(
        torch.full((1, 1, -(-kv_len // block_size) - max(first, last)), EMPTY, device=device)
    )
    batch, num_heads = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    return torch.cat([part.expand(batch, num_heads, -1) for part in parts], -1)


def _kinds(allowed: Tensor, box: Box, block_size: int) -> Tensor:
    """What each block of a box is, from what the mask allows there."""
    height, width = box.rows.stop - box.rows.start, box.columns.stop - box.columns.start
    leading = cast(torch.Size, torch.broadcast_shapes(allowed.shape[:-2], (1, 1)))
    allowed = allowed.expand(*leading, height, width)
    padded = F.pad(allowed, (0, -width % block_size, 0, block_size - height))
    blocks = padded.reshape(
        *leading, block_size, -1, block_size
    )  # (batch, num_heads, rows, blocks, columns)
    return blocks.any(-1).any(-2).long() + blocks.all(-1).all(-2)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks how many are chosen, and all blocks with the chosen ones first."""
    indices = chosen.byte().sort(dim=-1, descending=True, stable=True).indices
    return chosen.sum(-1, dtype=torch.int32), indices.int()
