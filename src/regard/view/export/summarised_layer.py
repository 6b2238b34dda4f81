"""A layer that is too large for a page: block means of one byte each.

A block is 2^level x 2^level tokens, counted from token 0, so that every coarser tile of the map is
a mean of blocks; `block_means.ts` reads them.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.block import RowStatistics
from regard.reductions.reduction import Contribution
from regard.reductions.sums import SumsOfRows
from regard.view.tiles.manifest import PageLayer
from regard.view.tiles.mask_intervals import intervals
from regard.view.tiles.packing import packed

__all__ = [
    "BlockMeans",
    "block_of",
    "embed_block_means",
    "levels_of",
    "most_bytes",
]

MOST_BLOCKS = 512
OCTAVES = 32.0


@final
@dataclass(frozen=True)
class BlockMeans(SumsOfRows):
    """The mean weight of each block of ``size`` x ``size`` tokens, counted from token 0.

    The answer has shape (..., num_heads, ceil(q_len / size), ceil(kv_len / size)); a block at the
    edge is the mean of what there is.

    Args:
        size: tokens of a block, each way.

    Example:
        >>> import torch, regard
        >>> from regard.view.export.summarised_layer import BlockMeans
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Causal()).reduce(BlockMeans(2))
        tensor([[0.5000, 0.0000],
                [0.3333, 0.3333]])
    """

    size: int

    def parts(self, rows: slice, shape: torch.Size) -> list[slice]:
        edges = accumulate(_met(rows, self.size)[1], initial=0)
        return [slice(start, stop) for start, stop in pairwise(edges)]

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        rows, columns = (-(-length // self.size) for length in shape[-2:])
        return (torch.zeros(*shape[:-2], rows, columns, dtype=dtype, device=device),)

    def update(self, block: RowStatistics) -> tuple[Contribution, ...]:
        rows, _ = _met(block.box.rows, self.size)
        start, stop = block.box.columns.start, block.box.columns.stop
        columns = slice(start // self.size, -(-stop // self.size))
        sums = block.sum_rows(self.parts(block.box.rows, block.shape))
        edges = (start - columns.start * self.size, columns.stop * self.size - stop)
        sums = torch.nn.functional.pad(sums, edges)
        blocks = sums.reshape(*sums.shape[:-1], -1, self.size).sum(-1)
        return (Contribution((*block.box.leading, rows, columns), blocks),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        down, across = (
            torch.tensor(_met(slice(0, n), self.size)[1], device="cpu") for n in shape[-2:]
        )
        return buffers[0] / (down[:, None] * across).to(buffers[0])


def block_of(shape: Sequence[int]) -> int:
    """Tokens of a block: the least power of two with at most 512 blocks each way.

    Args:
        shape: of the matrix, (..., q_len, kv_len).

    Example:
        >>> from regard.view.export.summarised_layer import block_of
        >>> block_of((9, 512, 512)), block_of((1, 131_072, 131_072))
        (1, 256)
    """
    return 1 << (-(-max(shape[-2:]) // MOST_BLOCKS) - 1).bit_length()


def most_bytes(shape: Sequence[int]) -> int:
    """So many bytes the block means take at most in a file, deflated or not.

    Args:
        shape: of the matrix, (num_heads, q_len, kv_len).
    """
    size = block_of(shape)
    cells = shape[0] * math.prod(-(-length // size) for length in shape[-2:])
    return (cells + cells // 1000 + 512) * 4 // 3


def embed_block_means(layer: PageLayer, matrix: AttentionMatrix, means: Tensor) -> dict[str, str]:
    """Store a layer as block means in the page's JSON, and set the layer's fields.

    Args:
        layer: what the page reads of it.
        matrix: (num_heads, q_len, kv_len).
        means: the answer to ``BlockMeans(block_of(matrix.shape))``.

    Returns:
        The means, and for each row the keys that are allowed, if these are one interval.
    """
    layer.kind = "pyramid"
    layer.block = block_of(matrix.shape)
    levels, layer.maximum, layer.octaves = levels_of(means)
    block = {"levels": packed(levels, zlib.Z_DEFAULT_STRATEGY, 1)}
    spans = _spans(matrix)
    layer.span_heads = 0 if spans is None else spans.shape[0]
    if spans is not None:
        block["spans"] = packed(spans, zlib.Z_DEFAULT_STRATEGY)
    return block


def levels_of(means: Tensor) -> tuple[Tensor, float, float]:
    """Means in a byte each: level l is maximum * 2^(-octaves * (254 - l) / 253), level 0 is 0.

    So each is right to the same part of itself, 2^(octaves / 506) - 1, however small it is; those
    more than 32 octaves below the largest are level 1. Level 255 is a mean that is not a number.

    Args:
        means: none below 0.

    Returns:
        The levels (uint8, the same shape), the maximum, the octaves.

    Example:
        >>> import torch
        >>> from regard.view.export.summarised_layer import levels_of
        >>> levels_of(torch.tensor([0.0, 0.125, 0.5, torch.nan]))
        (tensor([  0,   1, 254, 255], dtype=torch.uint8), 0.5, 2.0)
    """
    means = means.cpu().double()
    known = means.nan_to_num(0.0)
    maximum = float(known.max())
    levels = torch.zeros_like(known)
    octaves = 0.0
    if maximum > 0:
        below = -(known / maximum).log2()  # octaves; infinite for 0
        octaves = min(OCTAVES, float(below[known > 0].max()))
        steps = below * (253 / octaves) if octaves > 0 else torch.zeros_like(below)
        levels = torch.where(known > 0, (254 - steps.round()).clamp(min=1), 0)
    return levels.masked_fill(means.isnan(), 255).to(torch.uint8), maximum, octaves


def _spans(matrix: AttentionMatrix) -> Tensor | None:
    """As ``intervals``; None where a row has none. Written out where every key is allowed."""
    spans = intervals(matrix)
    if isinstance(spans, str):
        return None
    everything = torch.tensor([0, matrix.shape[-1]], dtype=torch.int32, device="cpu")
    return everything.expand(1, matrix.shape[-2], 2) if spans is None else spans


def _met(part: slice, size: int) -> tuple[slice, list[int]]:
    """Return the blocks that a part of an axis overlaps, and how many positions lie in each."""
    blocks = slice(part.start // size, -(-part.stop // size))
    edges = [part.start, *(block * size for block in range(blocks.start + 1, blocks.stop))]
    return blocks, [stop - start for start, stop in pairwise([*edges, part.stop])]
