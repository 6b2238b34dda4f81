"""The goals of memory: gradients, and every reduction at a length where no dense way can go."""

from typing import Any

import torch

import regard
from benchmarks.case import Case, Effort, Measured
from benchmarks.meter import added, peak, warm_up
from benchmarks.questions import QUESTIONS, spans
from benchmarks.tensors import random_inputs

__all__ = ["ADDED_MIB", "CASES"]

ASKED = ("entropy", "sum(-2)", "topk(8)", "pool(64, 64)")
ADDED_MIB, WHOLE_MIB = 300, 1536  # a question at any length; the whole process at the longest


def gradient(name: str) -> Case:
    """MiB that a question adds with its gradient."""

    def measure(effort: Effort) -> Measured:
        inputs = random_inputs(effort.tokens, 1)
        query, key = inputs.query.requires_grad_(), inputs.key.requires_grad_()

        def work() -> None:
            answer: Any = QUESTIONS[name].ask(regard.attend(query, key), inputs.value)
            numbers = answer.values if isinstance(answer, regard.Top) else answer
            numbers.backward(torch.ones_like(numbers))

        warm_up()
        mib = added(work)
        return Measured(mib, 1, mib, mib)

    return Case("memory", f"gradient of {name}", "MiB", measure, (32_768,), ADDED_MIB)


def every_reduction(effort: Effort) -> Measured:
    """MiB of the whole process, PyTorch and the inputs included, in one pass."""
    query, key, _ = random_inputs(effort.tokens, 1)
    regard.attend(query, key).reduce(
        regard.LogSumExp(),
        regard.Entropy(),
        regard.TopK(8),
        regard.TopK(64),
        regard.Sum(-1),
        regard.Sum(-2),
        regard.Pool(64, 64),
        regard.Pool(512, 512),
        regard.Segments(spans(effort.tokens)),
        regard.Diagonal(-1),
    )
    mib = peak()
    return Measured(mib, 1, mib, mib, beside="the whole process")


CASES = (
    *(gradient(name) for name in ASKED),
    Case("memory", "every reduction in one pass", "MiB", every_reduction, (131_072,), WHOLE_MIB),
)
