"""A layer that a page holds in full: query and key, or where they cannot tell it, all weights."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.reduction import Reduction
from regard.reductions.sums import Pool
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import accumulation_dtype
from regard.view.export.summarised_layer import BlockMeans
from regard.view.tiles.manifest import SMALL, PageLayer
from regard.view.tiles.mask_intervals import IRREGULAR, intervals
from regard.view.tiles.packing import packed
from regard.view.tiles.row_normalizers import RowNormalizers

__all__ = [
    "Block",
    "Stored",
    "Whole",
    "embed",
    "embed_means",
    "embed_row_normalizers",
    "embed_value",
    "fits_never",
    "least_size",
    "questions_of_whole",
]

MOST_WEIGHTS = 2**25  # a layer that can only be held as weights is held in memory on the way
SAMPLED_ROWS = 32
# From a tile of 256 x 256 blocks of this size on the page would compute for many seconds.
MEANS = 64

Block: TypeAlias = dict[str, str]
"""Numbers of a layer by their names, as the page's JSON has them."""

Stored: TypeAlias = Literal["float32", "float24", "float16"]
"""How numbers are stored; float24 is float32 without its last byte."""

BYTES: dict[Stored, int] = {"float32": 4, "float24": 3, "float16": 2}


@dataclass(frozen=True, eq=False)
class Whole:
    """A layer that is held in full.

    Attributes:
        block: its query and key, or its weights, and the keys that each row may attend to.
        shown: the matrix that the page computes from them; of weights the one they are from.
        size: the number of bytes it takes at most, those of its rows' normalizers included.
    """

    block: Block
    shown: AttentionMatrix

    @property
    def size(self) -> int:
        raw = 16 * math.prod(self.shown.shape[:-1]) if "query" in self.block else 0
        return sum(map(len, self.block.values())) + (raw + raw // 1000 + 192) * 4 // 3


def fits_never(matrix: AttentionMatrix) -> bool:
    """Return True if the weights do not follow from query and key, and are too many to store.

    Args:
        matrix: (num_heads, q_len, kv_len).
    """
    if math.prod(matrix.shape) <= MOST_WEIGHTS:
        return False
    return not _is_plain(matrix) or intervals(matrix) is IRREGULAR


def least_size(matrix: AttentionMatrix, stored: Stored) -> int:
    """Never more than what the layer will take: a sign, a mantissa and a little exponent.

    Args:
        matrix: (num_heads, q_len, kv_len).
        stored: how its numbers are.
    """
    if not isinstance(matrix.source, QueryKeyScores) or not _is_plain(matrix):
        # Weights may be nearly all zero, and then hundreds of them fit into a byte.
        return math.prod(matrix.shape) // 512
    numbers = matrix.source.query.numel() + matrix.source.key.numel()
    return numbers * BYTES[stored] // 4


def embed(layer: PageLayer, matrix: AttentionMatrix, stored: Stored) -> Whole:
    """Store a layer with query and key in the page's JSON, and set the layer's fields.

    Args:
        layer: what the page is told of it.
        matrix: (num_heads, q_len, kv_len), one that fits.
        stored: how its numbers are.
    """
    spans = intervals(matrix)
    source = matrix.source
    layer.dtype = stored
    layer.span_heads = 0
    block: Block = {}
    if isinstance(spans, Tensor):
        layer.span_heads = spans.shape[0]
        block["spans"] = packed(spans, zlib.Z_DEFAULT_STRATEGY)
    if not isinstance(source, QueryKeyScores) or not _is_plain(matrix) or spans is IRREGULAR:
        layer.kind = "weights"
        weights = _rounded(_all_weights(matrix), stored)
        layer.deviation = {"float32": 0.0, "float24": 2**-17, "float16": 2**-12}[stored]
        block["weights"] = packed(weights, zlib.Z_DEFAULT_STRATEGY, BYTES[stored])
        return Whole(block, matrix)
    layer.kind = "query-key"
    query, query_unit = _in_units(source.query, stored)
    key, key_unit = _in_units(source.key, stored)
    layer.num_kv_heads, layer.head_dim = key.shape[-3], key.shape[-1]
    layer.scale = source.scale * query_unit * key_unit
    layer.query_unit, layer.key_unit = query_unit, key_unit
    # In float32 a large score is rounded by more than a weight may be off. Of numbers that are
    # stored in fewer bits that does not matter: these bits are a larger part of each score.
    wide = torch.float64 if stored == "float32" else torch.float32
    shown = AttentionMatrix(QueryKeyScores(query.to(wide), key.to(wide), layer.scale), matrix.mask)
    if stored != "float32":
        layer.deviation = _deviation(matrix, shown)
    # Query and key look like noise: searching them for repetitions finds none and takes long.
    block["query"] = packed(query, zlib.Z_HUFFMAN_ONLY, BYTES[stored])
    block["key"] = packed(key, zlib.Z_HUFFMAN_ONLY, BYTES[stored])
    return Whole(block, shown)


def questions_of_whole(layer: PageLayer, aside: Sequence[int]) -> list[Reduction]:
    """Return the reductions to ask of a matrix that the page computes itself.

    Args:
        layer: what the page is told of it.
        aside: the keys that are set aside where sinks are hidden.
    """
    if layer.kind == "weights":  # of which the page sums a row itself
        return [Pool(SMALL, SMALL)]
    asked: list[Reduction] = [Pool(SMALL, SMALL), RowNormalizers(tuple(aside))]
    is_long = max(layer.q_len, layer.kv_len) > 128 * MEANS
    return [*asked, BlockMeans(MEANS)] if is_long else asked


def embed_row_normalizers(numbers: Tensor) -> Block:
    """Return the numbers that turn the scores of each row into weights, in float32.

    They are float32 whatever query and key are stored in: half precision would take three digits
    from every weight. A log-normalizer is that of the maximum as it is stored.

    Args:
        numbers: the answer to ``RowNormalizers``, (num_heads, q_len, 4).
    """
    stored = numbers.float()
    lost = (numbers - stored)[..., ::2].nan_to_num(0.0)  # an infinite maximum loses nothing
    stored[..., 1::2] = numbers[..., 1::2] + lost
    return {"rows": packed(stored.movedim(-1, 0), zlib.Z_HUFFMAN_ONLY)}


def embed_means(layer: PageLayer, means: Tensor) -> Block:
    """Store the block means of a long layer in 24 bits, and set the layer's fields.

    Args:
        layer: what the page is told of it.
        means: the answer to ``BlockMeans``, (num_heads, rows, columns).
    """
    layer.block = MEANS
    rounded = _rounded(means, "float24")
    return {"means": packed(rounded, zlib.Z_DEFAULT_STRATEGY, BYTES["float24"])}


def embed_value(layer: PageLayer, value: Tensor) -> dict[str, str]:
    """Store the value of a complete layer in the page's JSON, and set the layer's fields.

    Args:
        layer: what the page is told of it.
        value: (num_kv_heads, kv_len, value_dim).
    """
    rounded, layer.value_unit = _in_units(value, layer.dtype)
    layer.value_heads, _, layer.value_dim = value.shape
    return {"value": packed(rounded, zlib.Z_HUFFMAN_ONLY, BYTES[layer.dtype])}


def _is_plain(matrix: AttentionMatrix) -> bool:
    """Return True if the scores depend on query, key and scale alone."""
    source = matrix.source
    return isinstance(source, QueryKeyScores) and source.bias is None and source.plain


def _in_units(tensor: Tensor, stored: Stored) -> tuple[Tensor, float]:
    """Divide a tensor by a power of two, so that float16 neither overflows nor underflows."""
    if stored != "float16":
        return _rounded(tensor, stored), 1.0
    largest = float(tensor.abs().max())
    unit = 2.0 ** math.floor(math.log2(largest)) if 0 < largest < math.inf else 1.0
    return _rounded(tensor.double() / unit, stored), unit


def _rounded(tensor: Tensor, stored: Stored) -> Tensor:
    if stored == "float16":
        return tensor.half()
    single = tensor.float()
    if stored == "float32":
        return single
    # Half of the byte that is left out, so that what stays is the nearest.
    nearest = (single.view(torch.int32) + 0x80) & ~0xFF
    return torch.where(single.isfinite(), nearest.view(torch.float32), single)


def _deviation(matrix: AttentionMatrix, rounded: AttentionMatrix) -> float:
    """Return the largest difference of a weight, on evenly spaced rows."""
    step = max(1, matrix.shape[-2] // SAMPLED_ROWS)
    rows = slice(None, None, step)
    difference = _weights(matrix, rows) - _weights(rounded, rows)
    return float(difference.abs().nan_to_num(0.0).max())


def _all_weights(matrix: AttentionMatrix) -> Tensor:
    length = matrix.shape[-2]
    step = max(1, 2**22 // matrix.shape[-1])
    parts = [slice(start, start + step) for start in range(0, length, step)]
    return torch.cat([_weights(matrix, rows) for rows in parts], dim=-2)


def _weights(matrix: AttentionMatrix, rows: slice) -> Tensor:
    """Return some rows in float32, or float64 for float64 inputs, without rounding to the dtype."""
    part = matrix.to(accumulation_dtype(matrix.dtype))[..., rows, :]
    return part.to_dense() if isinstance(part, AttentionMatrix) else part
