"""What is asked of the matrix, by every group of benchmarks."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

import regard

__all__ = [
    "ALL",
    "LONG",
    "OUTPUT",
    "QUESTIONS",
    "SHORT",
    "WEIGHTS",
    "Ask",
    "Question",
    "everything",
    "spans",
]

Ask = Callable[[regard.AttentionMatrix, Tensor], object]

SPANS = 16


class Question(NamedTuple):
    """One question.

    Attributes:
        ask: asks it of a matrix, given the value.
        goals: at most so many forwards, by the number of tokens.
        passes: over the matrix, that it cannot do without.
    """

    ask: Ask
    goals: Mapping[int, float]
    passes: tuple[str, ...]


def spans(tokens: int) -> list[tuple[int, int]]:
    """SPANS pieces of one length that cover the text."""
    edges = [tokens * i // SPANS for i in range(SPANS + 1)]
    return list(pairwise(edges))


def everything(matrix: regard.AttentionMatrix, value: Tensor, backend: str | None = None) -> object:
    """The output and five statistics in one pass."""
    return matrix.reduce(
        regard.Output(value),
        regard.LogSumExp(),
        regard.Entropy(),
        regard.Sum(-2),
        regard.TopK(8),
        regard.Pool(64, 64),
        backend=backend,
    )


SHORT, LONG = 4096, 16_384
STATISTIC = {SHORT: 0.7, LONG: 0.8}
WEIGHTS = ("scores", "exp")

OUTPUT = "A @ value"
ALL = "output and five statistics"
QUESTIONS = {
    OUTPUT: Question(lambda a, v: a @ v, {SHORT: 1.02, LONG: 1.02}, ("forward",)),
    "logsumexp": Question(lambda a, _: a.logsumexp(), STATISTIC, WEIGHTS),
    "entropy": Question(lambda a, _: a.entropy(), STATISTIC, WEIGHTS),
    "topk(8)": Question(lambda a, _: a.topk(8), {SHORT: 0.8, LONG: 0.9}, WEIGHTS),
    "topk(64)": Question(lambda a, _: a.topk(64), {SHORT: 1.0, LONG: 1.1}, WEIGHTS),
    "sum(-2)": Question(lambda a, _: a.sum(-2), STATISTIC, WEIGHTS),
    "pool(64, 64)": Question(lambda a, _: a.pool(64, 64), STATISTIC, WEIGHTS),
    "segments(16)": Question(lambda a, _: a.segments(spans(a.shape[-1])), STATISTIC, WEIGHTS),
    "diagonal(-1)": Question(lambda a, _: a.diagonal(-1), STATISTIC, WEIGHTS),
    ALL: Question(everything, {SHORT: 1.3, LONG: 1.4}, (*WEIGHTS, "product")),
}
