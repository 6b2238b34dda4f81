"""regard: self-attention that you can compute, see and trust, from 3 tokens to 100,000."""

from regard import masks, nn, spans, trials
from regard.biases import ALiBi, Bias, T5Bias
from regard.bilinears import Bilinear, bilinear
from regard.block import Block
from regard.capture.watch import observe
from regard.divergences import CrossEntropy, JensenShannon, KullbackLeibler, cross_entropy, js, kl
from regard.errors import RegardError
from regard.explanation import Explanation, explain
from regard.faults.examine import check
from regard.loading import load
from regard.masks import (
    Causal,
    Documents,
    Drop,
    Keep,
    Mask,
    MaskMod,
    Padding,
    PrefixLM,
    SlidingWindow,
)
from regard.matrix import AttentionMatrix, attend
from regard.products import Output
from regard.ranking import Max, Top, TopK
from regard.recording import Recording
from regard.reductions import (
    Diagonal,
    Entropy,
    LogSumExp,
    Part,
    Pool,
    Reduction,
    Segments,
    Sum,
)
from regard.rollouts import Rollout, rollout
from regard.see import plot
from regard.see.file import write_page as page
from regard.see.notebook import show
from regard.shares import Shares
from regard.steps import Steps
from regard.tables import Table
from regard.tokens import Token, tokens_of

__all__ = [
    "ALiBi",
    "AttentionMatrix",
    "Bias",
    "Bilinear",
    "Block",
    "Causal",
    "CrossEntropy",
    "Diagonal",
    "Documents",
    "Drop",
    "Entropy",
    "Explanation",
    "JensenShannon",
    "Keep",
    "KullbackLeibler",
    "LogSumExp",
    "Mask",
    "MaskMod",
    "Max",
    "Output",
    "Padding",
    "Part",
    "Pool",
    "PrefixLM",
    "Recording",
    "Reduction",
    "RegardError",
    "Rollout",
    "Segments",
    "Shares",
    "SlidingWindow",
    "Steps",
    "Sum",
    "T5Bias",
    "Table",
    "Token",
    "Top",
    "TopK",
    "attend",
    "bilinear",
    "check",
    "cross_entropy",
    "explain",
    "js",
    "kl",
    "load",
    "masks",
    "nn",
    "observe",
    "page",
    "plot",
    "rollout",
    "show",
    "spans",
    "tokens_of",
    "trials",
]
