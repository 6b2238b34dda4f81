"""regard: self-attention that you can compute, see and trust, from 3 tokens to 100,000."""

from regard import images, masks, nn
from regard.analysis import exports
from regard.analysis.head_classes import heads
from regard.analysis.span_shares import Shares, segment_shares
from regard.capture.locating import locate
from regard.capture.observer import observe
from regard.corpus.surveying import survey
from regard.diagnosis.checker import check
from regard.diagnosis.expectation import ANY, spec
from regard.errors import RefusedWarning, RegardError
from regard.images.patch_grid import grid
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
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.matrix.comparisons import (
    cross_entropy,
    js,
    kl,
)
from regard.matrix.explanation import Explanation, explain
from regard.matrix.rollouts import Rollout, rollout
from regard.matrix.weighted_sums import weighted_sum
from regard.models import trials
from regard.recording.file_reader import load
from regard.recording.recording import Recording
from regard.reductions.block import Block
from regard.reductions.products import Output
from regard.reductions.reduction import Contribution, Reduction
from regard.reductions.row_statistics import Entropy, LogSumExp, MaxScore
from regard.reductions.sums import Diagonal, Pool, Segments, Sum
from regard.reductions.top_k import Top, TopK
from regard.scores.position_bias import ALiBi, Bias, T5Bias
from regard.text import spans
from regard.text.tables import Table
from regard.text.tokens import Token, tokens_of
from regard.training import alarms, callbacks, writers
from regard.training.monitor import Monitor
from regard.view.export.page_file import write_page as page
from regard.view.figures import plot
from regard.view.notebook.notebook_page import show
from regard.view.row_steps import Steps, steps, table

__all__ = [
    "ANY",
    "ALiBi",
    "AttentionMatrix",
    "Bias",
    "Block",
    "Causal",
    "Contribution",
    "Diagonal",
    "Documents",
    "Drop",
    "Entropy",
    "Explanation",
    "Keep",
    "LogSumExp",
    "Mask",
    "MaskMod",
    "MaxScore",
    "Monitor",
    "Output",
    "Padding",
    "Pool",
    "PrefixLM",
    "Recording",
    "Reduction",
    "RefusedWarning",
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
    "alarms",
    "attend",
    "callbacks",
    "check",
    "cross_entropy",
    "explain",
    "exports",
    "grid",
    "heads",
    "images",
    "js",
    "kl",
    "load",
    "locate",
    "masks",
    "nn",
    "observe",
    "page",
    "plot",
    "rollout",
    "segment_shares",
    "show",
    "spans",
    "spec",
    "steps",
    "survey",
    "table",
    "tokens_of",
    "trials",
    "weighted_sum",
    "writers",
]
