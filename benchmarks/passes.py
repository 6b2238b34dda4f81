"""What each pass over the matrix takes at the least, as a share of one fused forward.

In plain PyTorch, on one thread, in blocks of complete rows of the height that suits the pass best:
what a question cannot do without is its floor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.case import Case, Effort, Measured
from benchmarks.patterns import WINDOW
from benchmarks.questions import ALL, QUESTIONS
from benchmarks.sides import Prepare, backward, forward
from benchmarks.tensors import Inputs, random_inputs
from benchmarks.turns import ratio

__all__ = ["CASES"]

TOKENS = 4096
HEIGHTS = (32, 64, 128, 256)
GROUP = 32  # columns in a group, of which the maximum is taken first


@dataclass(frozen=True)
class Block:
    """Memory for one block, used again for each: it stays in the cache.

    Attributes:
        query: (rows, head_dim).
        key: (head_dim, tokens); value: (tokens, head_dim).
        scores, weights: (rows, tokens), float32.
        narrow: (rows, tokens), of the dtype of the inputs.
        ones: (1, tokens).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    weights: Tensor
    narrow: Tensor
    ones: Tensor


Way = Callable[[Block], object]

# The quickest of several ways counts.
PASSES: dict[str, dict[str, Way]] = {
    "scores": {"mm": lambda b: torch.mm(b.query, b.key, out=b.narrow)},
    "exp": {
        "exp": lambda b: torch.exp(b.scores, out=b.weights),
        "softmax": lambda b: torch.softmax(b.scores, -1, out=b.weights),
    },
    "row sum": {
        "sum": lambda b: b.weights.sum(-1),
        "mv": lambda b: b.weights @ b.ones[0],
    },
    "column sum": {
        "sum": lambda b: b.weights.sum(0),
        "mm": lambda b: b.ones[:, : len(b.weights)] @ b.weights,
    },
    "group maxima": {"amax": lambda b: groups(b.scores).amax(1)},
    "top of groups": {"topk": lambda b: groups(b.scores)[:, 0].topk(8)},
    "top of rows": {"topk": lambda b: b.scores.topk(8)},
    "product": {"mm": lambda b: torch.mm(b.narrow, b.value)},
}


def groups(scores: Tensor) -> Tensor:
    """(rows, group, groups): a group is every so manieth column, which is read in one stride."""
    size = min(GROUP, scores.shape[-1] // 8)
    return scores.view(len(scores), size, -1)


def block(inputs: Inputs, rows: int) -> Block:
    query, key, value = (tensor[0, 0] for tensor in inputs)
    query, key = query[:rows], key.mT
    scores = query.float() @ key.float() / 8  # as a softmax sees them: moderate, no denormals
    return Block(
        query,
        key,
        value,
        scores,
        scores.exp(),
        scores.to(query.dtype),
        torch.ones(1, inputs.tokens),
    )


def case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """The share of a forward of the same dtype, on one thread."""

    def measure(effort: Effort) -> Measured:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return best(name, random_inputs(effort.tokens, 1, dtype=dtype), effort.repetitions)
        finally:
            torch.set_num_threads(threads)

    kind = "" if dtype == torch.float32 else ", bfloat16"
    return Case("passes", name + kind, "forwards", measure, (TOKENS,))


def best(name: str, inputs: Inputs, repetitions: int) -> Measured:
    """The quickest way of a pass, at the height that suits it."""

    def measured(way: str, rows: int) -> Measured:
        same, work = block(inputs, rows), PASSES[name][way]

        def whole_matrix() -> None:
            for _ in range(inputs.tokens // rows):
                work(same)

        found = ratio(whole_matrix, forward()(inputs), repetitions)
        return replace(found, beside=f"{way} on {rows} rows; {found.beside}")

    heights = [rows for rows in HEIGHTS if rows <= inputs.tokens]
    tried = [measured(way, rows) for way in PASSES[name] for rows in heights]
    return min(tried, key=lambda found: found.value)


def masked(name: str, side: Callable[[Prepare], Prepare]) -> Case:
    """What a bool tensor as a mask makes of SDPA, in forwards or backwards without one."""

    def measure(effort: Effort) -> Measured:
        inputs = random_inputs(effort.tokens, 1)
        ours, peer = side(forward(WINDOW))(inputs), side(forward())(inputs)
        return ratio(ours, peer, effort.repetitions)

    return Case("passes", f"masked {name}", f"{name}s", measure, (TOKENS,))


CASES = (
    *(case(name) for name in PASSES),
    *(case(name, torch.bfloat16) for name in dict.fromkeys(QUESTIONS[ALL].passes)),
    masked("forward", lambda side: side),
    masked("backward", backward),
)
