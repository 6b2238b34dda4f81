"""What each pass over the matrix takes at the least, as a share of one fused forward.

In plain PyTorch, on one thread, in blocks of complete rows of the height that suits the pass best:
what a question cannot do without is its floor. All but one see the same block again and again, so
that it stays in the cache; which are the largest differs from row to row, or the processor would
learn the answers.
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
from benchmarks.turns import one_thread, ratio

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
        scores, weights, third: (rows, tokens), float32.
        column: (rows, 1), zeros.
        narrow: (rows, tokens), of the dtype of the inputs.
        ones: (1, tokens).
        maxima: (all rows, groups), of the scores of each group of columns.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    weights: Tensor
    third: Tensor
    column: Tensor
    narrow: Tensor
    ones: Tensor
    maxima: Tensor


Way = Callable[[Block, slice], object]  # the rows are those of the whole matrix

# The quickest of several ways counts.
PASSES: dict[str, dict[str, Way]] = {
    "scores": {"mm": lambda b, _: torch.mm(b.query, b.key, out=b.narrow)},
    "row maximum": {"amax": lambda b, _: b.scores.amax(-1, keepdim=True)},
    "shift": {"add": lambda b, _: torch.add(b.column, b.scores, alpha=1.0, out=b.scores)},
    "exp": {
        "exp2": lambda b, _: torch.exp2(b.scores, out=b.weights),
        "softmax": lambda b, _: torch.softmax(b.scores, -1, out=b.weights),
    },
    "row sum": {
        "sum": lambda b, _: b.weights.sum(-1),
        "mv": lambda b, _: b.weights @ b.ones[0],
    },
    "row product": {
        "mul": lambda b, _: torch.mul(b.weights, b.scores, out=b.third).sum(-1),
        "bmm": lambda b, _: torch.linalg.vecdot(b.weights, b.scores),
    },
    "column sum": {
        "sum": lambda b, _: b.weights.sum(0),
        "mm": lambda b, _: b.ones[:, : len(b.weights)] @ b.weights,
    },
    "group maxima": {"amax": lambda b, _: groups(b.scores).amax(1)},
    "top of groups": {"topk": lambda b, rows: b.maxima[rows].topk(8)},
    "top of rows": {"topk": lambda b, _: b.scores.topk(8)},
    "product": {"mm": lambda b, _: torch.mm(b.narrow, b.value)},
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
        torch.empty_like(scores),
        torch.zeros(rows, 1),
        scores.to(query.dtype),
        torch.ones(1, inputs.tokens),
        torch.randn(inputs.tokens, max(8, inputs.tokens // GROUP)),
    )


def case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """The share of a forward of the same dtype, on one thread."""

    def measure(effort: Effort) -> Measured:
        with one_thread():
            return best(name, random_inputs(effort.tokens, 1, dtype=dtype), effort.repetitions)

    kind = "" if dtype == torch.float32 else ", bfloat16"
    return Case("passes", name + kind, "forwards", measure, (TOKENS,))


def best(name: str, inputs: Inputs, repetitions: int) -> Measured:
    """The quickest way of a pass, at the height that suits it."""

    def measured(way: str, rows: int) -> Measured:
        same, work = block(inputs, rows), PASSES[name][way]

        def whole_matrix() -> None:
            for start in range(0, inputs.tokens, rows):
                work(same, slice(start, start + rows))

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
