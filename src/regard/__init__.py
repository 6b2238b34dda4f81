"""regard: self-attention that you can compute, see and trust, from 3 tokens to 100,000."""

from regard.block import Block
from regard.errors import RegardError
from regard.masks import Causal, Drop, Keep, Mask, Padding, SlidingWindow
from regard.matrix import AttentionMatrix, attend
from regard.products import Output
from regard.reductions import (
    Diagonal,
    Entropy,
    LogSumExp,
    Max,
    Part,
    Pool,
    Reduction,
    Segments,
    Sum,
    Top,
    TopK,
)

__all__ = [
    "AttentionMatrix",
    "Block",
    "Causal",
    "Diagonal",
    "Drop",
    "Entropy",
    "Keep",
    "LogSumExp",
    "Mask",
    "Max",
    "Output",
    "Padding",
    "Part",
    "Pool",
    "Reduction",
    "RegardError",
    "Segments",
    "SlidingWindow",
    "Sum",
    "Top",
    "TopK",
    "attend",
]
