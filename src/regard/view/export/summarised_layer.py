"""A layer that is too large for a page: block means of one byte each.

A block is 2^level x 2^level tokens, counted from token 0, so that every coarser tile of the map is
a mean of blocks; `block_means.ts` reads them.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.sums import Segments
from regard.view.tiles.manifest import PageLayer
from regard.view.tiles.mask_intervals import intervals
from regard.view.tiles.packing import packed

MOST_BLOCKS = 512
FEWEST_BLOCKS = 32
OCTAVES = 32.0


def block_sums(shape: Sequence[int], size: int) -> Segments:
    """Return the question whose answer ``block_means`` needs.

    Args:
        shape: of the matrix, (..., q_len, kv_len).
        size: tokens of a block, each way, counted from token 0.
    """
    spans = [
        [(start, min(start + size, length)) for start in range(0, length, size)]
        for length in shape[-2:]
    ]
    return Segments(*spans)


def block_means(question: Segments, answer: Tensor) -> Tensor:
    """Return the mean weight of each block; a block at the edge is the mean of what there is.

    Args:
        question: from ``block_sums``.
        answer: of a matrix to it, (..., num_heads, rows, columns).

    Example:
        >>> import torch, regard
        >>> from regard.view.export.summarised_layer import block_means, block_sums
        >>> x = torch.zeros(3, 1)
        >>> A = regard.attend(x, x, mask=regard.Causal())
        >>> question = block_sums(A.shape, 2)
        >>> block_means(question, A.reduce(question)).float()
        tensor([[0.5000, 0.0000],
                [0.3333, 0.3333]])
    """
    start, stop = question.key_edges.to(answer.device).unbind(-1)
    return answer / (stop - start)


def block_of(shape: Sequence[int], most: int = MOST_BLOCKS) -> int:
    """Return the tokens of a block: the least power of two with at most so many blocks each way.

    Example:
        >>> from regard.view.export.summarised_layer import block_of
        >>> block_of((9, 512, 512)), block_of((1, 131_072, 131_072))
        (1, 256)
    """
    return 1 << (-(-max(shape[-2:]) // most) - 1).bit_length()


class SummarisedLayer:
    """A layer of which the page holds block means.

    Args:
        layer: what the page is told of it so far.
        matrix: (num_heads, q_len, kv_len).
        block: tokens of a block, each way; those of at most 512 blocks when left out.

    Attributes:
        layer: what the page is told of it, its block means included.
        shown: the matrix.
        questions: the reduction whose answer ``finished`` needs.
    """

    def __init__(self, layer: PageLayer, matrix: AttentionMatrix, block: int | None = None) -> None:
        self.layer = replace(layer, kind="pyramid", block=block or block_of(matrix.shape))
        self.shown = matrix
        self.questions = [block_sums(matrix.shape, self.layer.block)]

    @property
    def size(self) -> int:
        """The number of bytes that the block means take at most, deflated or not."""
        return most_bytes(self.shown.shape, self.layer.block)

    def finished(self, answers: Sequence[Tensor], room: int) -> dict[str, str]:
        """Return the means, and the allowed keys of each row, if these are one interval."""
        means = block_means(self.questions[0], answers[0])
        levels, self.layer.maximum, self.layer.octaves = levels_of(means)
        block = {"levels": packed(levels, zlib.Z_DEFAULT_STRATEGY, 1)}
        spans = intervals(self.shown)
        if spans is None:  # every key is allowed, which is written out
            everything = torch.tensor([0, self.shown.shape[-1]], dtype=torch.int32, device="cpu")
            spans = everything.expand(1, self.shown.shape[-2], 2)
        if isinstance(spans, Tensor):
            self.layer.span_heads = spans.shape[0]
            block["spans"] = packed(spans, zlib.Z_DEFAULT_STRATEGY)
        return block


def most_bytes(shape: Sequence[int], size: int) -> int:
    """Return how many bytes the means of blocks of a size take at most, deflated or not."""
    cells = shape[0] * math.prod(-(-length // size) for length in shape[-2:])
    return (cells + cells // 1000 + 512) * 4 // 3


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
