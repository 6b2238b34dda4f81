"""What each pass over the matrix takes at the least, as a share of one fused forward.

In plain PyTorch, on one thread, in blocks of complete rows of the height that suits the pass best.
The same block is computed again and again, so that it stays in the cache. The floor of a question
is the sum of the passes that it cannot do without: its matrix products and one exponential for each
score.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.case import Case, Effort, Measured
from benchmarks.sides import forward
from benchmarks.tensors import Inputs, random_inputs
from benchmarks.turns import one_thread, ratio

__all__ = ["CASES"]

TOKENS = 4096
HEIGHTS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Block:
    """Memory for one block, which stays in the cache.

    Attributes:
        query: (rows, head_dim).
        key: (head_dim, tokens); value: (tokens, head_dim).
        scores: (rows, tokens), float32; weights: memory of the same shape.
        narrow: (rows, tokens), of the dtype of the inputs.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    weights: Tensor
    narrow: Tensor


PASSES: dict[str, Callable[[Block], object]] = {
    "scores": lambda b: torch.mm(b.query, b.key, out=b.narrow),
    "exp": lambda b: torch.exp2(b.scores, out=b.weights),
    "product": lambda b: torch.mm(b.narrow, b.value),
}


def block(inputs: Inputs, rows: int) -> Block:
    query, key, value = (tensor[0, 0] for tensor in inputs)
    query, key = query[:rows], key.mT
    scores = query.float() @ key.float() / 8  # as a softmax sees them: moderate, no denormals
    weights = torch.empty_like(scores)
    return Block(query, key, value, scores, weights, scores.to(query.dtype))


def case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """The share of a forward of the same dtype, on one thread."""

    def measure(effort: Effort) -> Measured:
        with one_thread():
            return best(name, random_inputs(effort.tokens, 1, dtype=dtype), effort.repetitions)

    kind = "" if dtype == torch.float32 else ", bfloat16"
    return Case("passes", name + kind, "forwards", measure, (TOKENS,))


def best(name: str, inputs: Inputs, repetitions: int) -> Measured:
    """A pass at the height that suits it best."""

    def measured(rows: int) -> Measured:
        same, work = block(inputs, rows), PASSES[name]

        def whole_matrix() -> None:
            for _ in range(0, inputs.tokens, rows):
                work(same)

        found = ratio(whole_matrix, forward()(inputs), repetitions)
        return replace(found, beside=f"{rows} rows; {found.beside}")

    tried = [measured(rows) for rows in HEIGHTS if rows <= inputs.tokens]
    return min(tried, key=lambda found: found.value)


CASES = tuple(case(name, dtype) for dtype in (torch.float32, torch.bfloat16) for name in PASSES)
