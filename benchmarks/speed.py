"""Seconds against one fused forward on the same tensors, taken in turns.

Both are run alternately and the medians divided, so that a machine that is busy with something
else slows both of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.case import Case, Measured

__all__ = ["CASES"]

NUM_HEADS, TOKENS, HEAD_DIM = 8, 8192, 64
REPETITIONS = 7
SPANS = 16

# Shares of one forward that a pass over the matrix takes at head_dim 64, in plain PyTorch, with
# the block in the cache (measured, see README.md). What a question cannot do without is its floor.
PASSES = {
    "forward": 1.0,
    "scores": 0.35,
    "product": 0.40,
    "exp": 0.10,
    "row sum": 0.03,
    "column sum": 0.04,
    "group maxima": 0.05,
}
STATISTIC = ("scores", "exp", "row sum")


class Inputs(NamedTuple):
    """The tensors that both sides get, each (1, num_heads, tokens, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor


Work = Callable[[Inputs], object]


@dataclass(frozen=True)
class Question:
    """What is asked of the matrix.

    Attributes:
        ask: asks it of a matrix, given the value.
        goal: at most so many forwards.
        passes: what it cannot do without.
    """

    ask: Callable[[regard.AttentionMatrix, Tensor], object]
    goal: float
    passes: tuple[str, ...]


def spans(tokens: int) -> list[tuple[int, int]]:
    """SPANS pieces of one length that cover the text."""
    edges = [tokens * i // SPANS for i in range(SPANS + 1)]
    return list(pairwise(edges))


def six(matrix: regard.AttentionMatrix, value: Tensor) -> object:
    """The output and six kinds of statistics at once."""
    return matrix.reduce(
        regard.Output(value),
        regard.LogSumExp(),
        regard.Entropy(),
        regard.TopK(8),
        regard.Sum(-2),
        regard.Pool(64, 64),
        regard.Segments(spans(matrix.shape[-1])),
    )


QUESTIONS = {
    "A @ value": Question(lambda a, v: a @ v, 1.05, ("forward",)),
    "logsumexp": Question(lambda a, _: a.logsumexp(), 1.5, STATISTIC),
    "entropy": Question(lambda a, _: a.entropy(), 1.5, (*STATISTIC, "row sum")),
    "topk(8)": Question(lambda a, _: a.topk(8), 1.5, (*STATISTIC, "group maxima")),
    "max": Question(lambda a, _: a.max(), 1.5, STATISTIC),
    "sum(-1)": Question(lambda a, _: a.sum(-1), 1.5, ()),
    "sum(-2)": Question(lambda a, _: a.sum(-2), 1.5, (*STATISTIC, "column sum")),
    "pool(64, 64)": Question(lambda a, _: a.pool(64, 64), 1.5, (*STATISTIC, "column sum")),
    "pool(512, 512)": Question(lambda a, _: a.pool(512, 512), 1.5, (*STATISTIC, "column sum")),
    "segments(16)": Question(
        lambda a, _: a.segments(spans(a.shape[-1])), 1.5, (*STATISTIC, "column sum")
    ),
    "diagonal(-1)": Question(lambda a, _: a.diagonal(-1), 1.5, STATISTIC),
    "output + six at once": Question(
        six, 3.0, (*STATISTIC, "product", "row sum", "group maxima", *("column sum",) * 3)
    ),
}


def eager(inputs: Inputs) -> object:
    """The known way to have the weights: form them."""
    weights = (inputs.query @ inputs.key.mT * HEAD_DIM**-0.5).softmax(-1)
    return weights @ inputs.value, weights


def eager_six(inputs: Inputs) -> object:
    """The known way to have the same statistics: of the weights, one after the other."""
    output, weights = eager(inputs)
    grid = F.adaptive_avg_pool2d(weights, 64)
    entropy = torch.special.entr(weights).sum(-1)
    pieces = [weights[..., start:stop].sum(-1) for start, stop in spans(weights.shape[-1])]
    return output, entropy, weights.topk(8), weights.sum(-2), grid, torch.stack(pieces, -1)


def forward(inputs: Inputs, causal: bool = False) -> Tensor:
    """The peer: one fused forward."""
    return F.scaled_dot_product_attention(*inputs, is_causal=causal)


def random_inputs(tokens: int, sharpness: float) -> Inputs:
    """Random tensors, the same on every run; sharpness multiplies the scores."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, NUM_HEADS, tokens, HEAD_DIM)
    return Inputs(query * sharpness, key, value)


def ratio(peer: Work, ours: Work, inputs: Inputs, repetitions: int) -> Measured:
    """How many peers ours takes."""
    seconds: dict[Work, list[float]] = {peer: [], ours: []}
    with torch.no_grad():
        for _ in range(repetitions + 1):
            for work, times in seconds.items():
                start = perf_counter()
                work(inputs)
                times.append(perf_counter() - start)
    ours_s, peer_s = seconds[ours][1:], seconds[peer][1:]  # the first of each warms up
    single = [a / b for a, b in zip(ours_s, peer_s, strict=True)]
    low, _, high = quantiles(single, n=4, method="inclusive") if len(single) > 1 else single * 3
    beside = f"one forward {median(peer_s):.3g} s"
    return Measured(median(ours_s) / median(peer_s), low, high, beside)


def against_forward(
    work: Work, sharpness: float = 1, causal: bool = False
) -> Callable[[bool], Measured]:
    """How to measure it, at full or at tiny size."""

    def measure(quick: bool) -> Measured:
        inputs = random_inputs(64 if quick else TOKENS, sharpness)
        return ratio(
            lambda given: forward(given, causal), work, inputs, 1 if quick else REPETITIONS
        )

    return measure


def case(name: str, question: Question, sharpness: float = 1, causal: bool = False) -> Case:
    mask = regard.Causal() if causal else None
    kind = "causal" if causal else "sharp" if sharpness > 1 else "randn"

    def work(inputs: Inputs) -> object:
        return question.ask(regard.attend(inputs.query, inputs.key, mask=mask), inputs.value)

    return Case(
        "speed",
        f"{name}, {kind}",
        "forwards",
        against_forward(work, sharpness, causal),
        floor=round(sum(PASSES[name] for name in question.passes), 2),
        goal=question.goal,
    )


CASES = (
    *(case(name, question) for name, question in QUESTIONS.items()),
    *(case(name, question, sharpness=30) for name, question in QUESTIONS.items()),
    *(case(name, question, causal=True) for name, question in QUESTIONS.items()),
    Case("speed", "eager softmax with weights", "forwards", against_forward(eager)),
    Case("speed", "eager softmax and the same six", "forwards", against_forward(eager_six)),
)
