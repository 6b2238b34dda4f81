"""A layer that a page holds in full: query and key, or where they cannot tell it, all weights."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Layer
from regard.recording.without_keys import without_keys
from regard.reductions.reduction import Reduction
from regard.reductions.sums import Segments
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import accumulation_dtype
from regard.view.export.summarised_layer import block_means, block_sums, most_bytes
from regard.view.tiles.manifest import PageLayer
from regard.view.tiles.mask_intervals import IRREGULAR, intervals
from regard.view.tiles.packing import packed
from regard.view.tiles.row_normalizers import RowNormalizers

MOST_WEIGHTS = 2**25  # a layer that can only be held as weights is held in memory on the way
MOST_COMPARED = 2**28  # weights of a layer that are compared with those of the stored numbers
# From a tile of 256 x 256 blocks of this size on the page would compute for many seconds.
MEANS = 64

Block: TypeAlias = dict[str, str]
"""Numbers of a layer by their names, as the page's JSON has them."""

Stored: TypeAlias = Literal["float32", "float16"]
"""The formats of stored numbers."""

BYTES: dict[Stored, int] = {"float32": 4, "float16": 2}


class CompleteLayer:
    """A layer of which the page holds query and key, or where they cannot tell it, all weights.

    Args:
        layer: what the page is told of it so far.
        matrix: (num_heads, q_len, kv_len), one that fits.
        stored: how its numbers are stored.
        aside: the keys that are set aside where sinks are hidden.
        value: (num_kv_heads, kv_len, value_dim), where the recording has it.

    Attributes:
        layer: what the page is told of it, its numbers included.
        block: its query and key, or its weights, and the keys that each row may attend to.
        shown: the matrix that the page computes from them; of weights the one they are from.
        questions: the reductions whose answers ``finished`` needs.
    """

    def __init__(
        self,
        layer: PageLayer,
        matrix: AttentionMatrix,
        stored: Stored,
        aside: Sequence[int],
        value: Tensor | None = None,
    ) -> None:
        self.layer = replace(layer, dtype=stored)
        self._value = value
        self._rounded_from: AttentionMatrix | None = None
        self.block: Block = {}
        self.questions: list[Reduction] = []
        spans = intervals(matrix)
        if isinstance(spans, Tensor):
            self.layer.span_heads = spans.shape[0]
            self.block["spans"] = packed(spans, zlib.Z_DEFAULT_STRATEGY)
        if (
            isinstance(matrix.source, QueryKeyScores)
            and _is_plain(matrix)
            and spans is not IRREGULAR
        ):
            self.shown = self._embed_query_key(matrix, matrix.source)
            self.questions.append(RowNormalizers())
            self._aside = tuple(aside)
            if max(layer.q_len, layer.kv_len) > 128 * MEANS:
                self.questions.append(block_sums(matrix.shape, MEANS))
        else:  # the page sums each row itself
            self.shown = matrix
            self.layer.kind = "weights"
            self.layer.deviation = {"float32": 0.0, "float16": 2**-12}[stored]
            weights = _rounded(_all_weights(matrix), stored)
            self.block["weights"] = packed(weights, zlib.Z_DEFAULT_STRATEGY, BYTES[stored])

    def _embed_query_key(self, matrix: AttentionMatrix, source: QueryKeyScores) -> AttentionMatrix:
        layer, stored = self.layer, self.layer.dtype
        layer.kind = "query-key"
        query, layer.query_unit = _in_units(source.query, stored)
        key, layer.key_unit = _in_units(source.key, stored)
        layer.num_kv_heads, layer.head_dim = key.shape[-3], key.shape[-1]
        layer.scale = source.scale * layer.query_unit * layer.key_unit
        # In float32 a large score is rounded by more than a weight may be off. Of numbers that are
        # stored in fewer bits that does not matter: these bits are a larger part of each score.
        wide = torch.float64 if stored == "float32" else torch.float32
        scores = QueryKeyScores(query.to(wide), key.to(wide), layer.scale)
        shown = AttentionMatrix(scores, matrix.mask)
        if stored != "float32":
            self._rounded_from = matrix
        # Query and key look like noise: searching them for repetitions finds none and takes long.
        self.block["query"] = packed(query, zlib.Z_HUFFMAN_ONLY, BYTES[stored])
        self.block["key"] = packed(key, zlib.Z_HUFFMAN_ONLY, BYTES[stored])
        return shown

    @property
    def size(self) -> int:
        """The number of bytes it takes at most, those of its rows' normalizers included."""
        raw = 16 * math.prod(self.shown.shape[:-1]) if "query" in self.block else 0
        return size_of(self.block) + (raw + raw // 1000 + 192) * 4 // 3

    @property
    def full_size(self) -> int:
        """The number of bytes it takes at most with all that it can hold: means and value, too."""
        means = 4 * most_bytes(self.shown.shape, MEANS) if len(self.questions) > 1 else 0
        if self._value is None:
            return self.size + means
        value = BYTES[self.layer.dtype] * self._value.numel()
        return self.size + means + (value + value // 1000 + 192) * 4 // 3

    def finished(self, answers: Sequence[Tensor], room: int) -> Block:
        """Return all numbers of the layer; those of the means of blocks where there is room."""
        if self._rounded_from is not None:
            weights = math.prod(self.shown.shape)
            self.layer.spacing = max(1, weights // MOST_COMPARED)
            deviation = _deviation(self._rounded_from, self.shown, self.layer.spacing)
            self.layer.deviation = deviation
        block = dict(self.block)
        if answers:
            apart = without_keys(self.shown, self._aside).reduce(RowNormalizers())
            block["rows"] = _packed_rows(torch.cat((answers[0], apart), -1))
        if len(answers) > 1:
            means = block_means(cast(Segments, self.questions[1]), answers[1]).float()
            text = packed(means, zlib.Z_DEFAULT_STRATEGY)
            if size_of(block) + len(text) <= room:
                self.layer.block = MEANS
                block["means"] = text
        return block

    def value_block(self, room: int) -> Block:
        """Return the value of the layer, where it has one and there is room."""
        value, stored = self._value, self.layer.dtype
        if value is None:
            return {}
        rounded, unit = _in_units(value, stored)
        block = {"value": packed(rounded, zlib.Z_HUFFMAN_ONLY, BYTES[stored])}
        if size_of(block) > room:
            return {}
        self.layer.value_unit = unit
        self.layer.value_heads, _, self.layer.value_dim = value.shape
        return block


def size_of(block: Block) -> int:
    """Return how many bytes of the page some numbers take."""
    return sum(map(len, block.values()))


def is_storable(matrix: AttentionMatrix) -> bool:
    """Return True if query and key tell a layer, or all of its weights fit into memory.

    Args:
        matrix: (num_heads, q_len, kv_len).
    """
    if math.prod(matrix.shape) <= MOST_WEIGHTS:
        return True
    return _is_plain(matrix) and intervals(matrix) is not IRREGULAR


def likely_size(layer: Layer) -> float:
    """Return about how many bytes a layer of the usual kind takes in 16 bits; infinity without one.

    Compression takes about what base64 adds, a third.
    """
    if layer.matrix is None:
        return math.inf
    source = layer.whole().source
    entries = math.prod(layer.shape[:-3])
    numbers = sum(tensor.numel() for tensor in source.tensors) / max(1, entries)
    return BYTES["float16"] * numbers + 16 * 4 / 3 * math.prod(layer.shape[-3:-1])


def _packed_rows(numbers: Tensor) -> str:
    """Return the numbers that turn the scores of each row into weights, in float32.

    They are float32 whatever query and key are stored in: half precision would take three digits
    from every weight. A log-normalizer is that of the maximum as it is stored.

    Args:
        numbers: the maximum and log-normalizer of each row, then both without sinks,
            (num_heads, q_len, 4).
    """
    stored = numbers.float()
    lost = (numbers - stored)[..., ::2].nan_to_num(0.0)  # an infinite maximum loses nothing
    stored[..., 1::2] = numbers[..., 1::2] + lost
    return packed(stored.movedim(-1, 0), zlib.Z_HUFFMAN_ONLY)


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
    return tensor.half() if stored == "float16" else tensor.float()


def _deviation(matrix: AttentionMatrix, rounded: AttentionMatrix, spacing: int) -> float:
    """Return the largest difference of a weight, or a bound where it is below one in a million.

    One row in ``spacing`` is measured.
    """
    bound = _most_deviation(
        cast(QueryKeyScores, matrix.source), cast(QueryKeyScores, rounded.source)
    )
    if bound < 1e-6:
        return bound
    height = max(1, 2**22 // matrix.shape[-1])
    largest = 0.0
    for start in range(0, matrix.shape[-2], height * spacing):
        rows = slice(start, start + height * spacing, spacing)
        difference = _weights(matrix, rows).sub_(_weights(rounded, rows)).nan_to_num_(0.0)
        largest = max(largest, *(abs(float(end)) for end in difference.aminmax()))
    return largest


def _most_deviation(source: QueryKeyScores, rounded: QueryKeyScores) -> float:
    """Return a bound on the difference of any weight, from how far query and key were rounded.

    A score moves by at most d = |query' - query| |key| + |query'| |key' - key|, and then a weight
    by at most exp(2 d) - 1.
    """
    query, key = source.query.double() * source.scale, source.key.double()
    near_query, near_key = rounded.query.double() * rounded.scale, rounded.key.double()
    unit = near_key.abs().max() / key.abs().max().clamp(min=1e-300)
    near_query, near_key = near_query * unit, near_key / unit
    lost = _longest(near_query - query), _longest(near_key - key)
    moved = lost[0] * _longest(key) + _longest(near_query) * lost[1]
    return math.expm1(2 * moved) if moved < 1 else math.inf


def _longest(vectors: Tensor) -> float:
    return math.sqrt(float(vectors.square().sum(-1).max()))


def _all_weights(matrix: AttentionMatrix) -> Tensor:
    length = matrix.shape[-2]
    step = max(1, 2**22 // matrix.shape[-1])
    parts = [slice(start, start + step) for start in range(0, length, step)]
    return torch.cat([_weights(matrix, rows) for rows in parts], dim=-2)


def _weights(matrix: AttentionMatrix, rows: slice) -> Tensor:
    """Return some rows in float32, or float64 for float64 inputs, without rounding to the dtype."""
    part = matrix.to(accumulation_dtype(matrix.dtype))[..., rows, :]
    return part.to_dense() if isinstance(part, AttentionMatrix) else part
