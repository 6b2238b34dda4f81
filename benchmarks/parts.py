"""What each question adds to one pass over the matrix that has those before it, in forwards.

On one thread, so that nothing waits for the other: beside its floor it shows where the time of
``output and five statistics`` goes.
"""

from collections.abc import Callable

from torch import Tensor

import regard
from benchmarks.case import Case, Effort, Measured, middle, passes
from benchmarks.questions import WEIGHTS
from benchmarks.sides import Work, forward
from benchmarks.tensors import random_inputs
from benchmarks.turns import in_turns, one_thread

__all__ = ["CASES"]

TOKENS = 4096

Ask = Callable[[Tensor], regard.Reduction]

PARTS: dict[str, tuple[Ask, tuple[str, ...]]] = {
    "logsumexp": (lambda _: regard.LogSumExp(), WEIGHTS),
    "output": (regard.Output, ("product",)),
    "entropy": (lambda _: regard.Entropy(), ()),
    "sum(-2)": (lambda _: regard.Sum(-2), ()),
    "topk(8)": (lambda _: regard.TopK(8), ()),
    "pool(64, 64)": (lambda _: regard.Pool(64, 64), ()),
}


def adds(name: str) -> Case:
    """What a question adds to those before it."""
    names = list(PARTS)[: list(PARTS).index(name) + 1]

    def asked(inputs_value: Tensor, matrix: regard.AttentionMatrix, count: int) -> Work:
        reductions = [PARTS[part][0](inputs_value) for part in names[:count]]
        return lambda: matrix.reduce(*reductions) if reductions else None

    def measure(effort: Effort) -> Measured:
        with one_thread():
            inputs = random_inputs(effort.tokens, 1)
            matrix = regard.attend(inputs.query, inputs.key)
            works = [asked(inputs.value, matrix, count) for count in (len(names), len(names) - 1)]
            with_it, without, peer = in_turns((*works, forward()(inputs)), effort.repetitions)
        return middle([(a - b) / c for a, b, c in zip(with_it, without, peer, strict=True)])

    return Case(
        "parts", f"{name} adds", "forwards", measure, (TOKENS,), None, passes(*PARTS[name][1])
    )


CASES = tuple(map(adds, PARTS))
