"""Who is asked what on the GPU: regard's kernels, PyTorch's, and the plain ways beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import regard
from benchmarks.gpu.size import GOALS_AT, KV_HEADS, Size
from benchmarks.questions import spans
from benchmarks.tensors import Inputs
from benchmarks.turns import Work
from regard.reductions.products import TransposedOutput

__all__ = ["FORWARD", "SIDES", "STATISTICS", "Questions", "Side", "matrix"]

Prepare = Callable[[Inputs, Size], Work]
Questions = Callable[[Inputs], tuple[regard.Reduction, ...]]

FORWARD = "forward, cuDNN through SDPA"
# Compiling takes seconds for each size, and blocks many forwards: more of them would take the time
# of all others.
COMPILED_AT = (GOALS_AT[0],)
BLOCKS_UP_TO = GOALS_AT[0]
DENSE_UP_TO = 8192
# With the output, what a picture of a layer asks for.
STATISTICS: tuple[regard.Reduction, ...] = (
    regard.LogSumExp(),
    regard.Entropy(),
    regard.Sum(-2),
    regard.TopK(8),
    regard.Pool(64, 64),
)


@dataclass(frozen=True)
class Side:
    """One thing that is timed.

    Attributes:
        name: of it.
        prepare: does what is done once and gives what is timed.
        asked: what it asks of regard's kernels, which has to be right; None: it asks them nothing.
        products: how many score products' FLOPs it needs; a forward needs 2.
        goal: at most so many forwards, at the size of the goals.
        lengths: only these; None: all.
        longest: at most so many tokens.
        slow: whether it takes so long that one head_dim and one number of key heads have to do.
        first_s: seconds that may have to be left for its first size, at which it compiles.
    """

    name: str
    prepare: Prepare
    asked: Questions | None = None
    products: int = 1
    goal: float | None = None
    lengths: tuple[int, ...] | None = None
    longest: int | None = None
    slow: bool = False
    first_s: float = 15.0

    def leaves_out(self, size: Size) -> str | None:
        """Why it is not measured at a size."""
        if self.lengths is not None and size.tokens not in self.lengths:
            return f"measured at {', '.join(f'{n:,}' for n in self.lengths)} only"
        if self.longest is not None and size.tokens > self.longest:
            return f"measured up to {self.longest:,}"
        head_dim, num_kv_heads = GOALS_AT[1], KV_HEADS[0]
        if self.slow and (size.head_dim, size.num_kv_heads) != (head_dim, num_kv_heads):
            return f"measured with head_dim {head_dim} and {num_kv_heads} key heads"
        return None


def matrix(given: Inputs, size: Size) -> regard.AttentionMatrix:
    """The attention matrix of these tensors."""
    mask = regard.Causal() if size.causal else None
    return regard.attend(given.query, given.key, mask=mask)


def answers(asked: Questions, backend: str) -> Prepare:
    """Reductions, each with what it needs before it; making the matrix is a part of it."""

    def prepare(given: Inputs, size: Size) -> Work:
        questions = asked(given)
        return lambda: matrix(given, size).reduce(*questions, backend=backend)

    return prepare


def kernels(name: str, asked: Questions, products: int = 1, goal: float | None = None) -> Side:
    """What regard's kernels answer by themselves."""
    return Side(name, answers(asked, "triton"), asked, products, goal)


def rows(_: Inputs) -> tuple[regard.Reduction, ...]:
    """In one pass."""
    return regard.LogSumExp(), regard.Entropy(), regard.TopK(1)


def segments(given: Inputs) -> tuple[regard.Reduction, ...]:
    """16 spans to 16 spans."""
    return (regard.Segments(spans(given.tokens)),)


def transposed(given: Inputs) -> tuple[regard.Reduction, ...]:
    """What each key receives of a vector for each query."""
    return (TransposedOutput(given.query),)


def everything(backend: str) -> Prepare:
    """The output by PyTorch's kernel, and the statistics in one call."""

    def prepare(given: Inputs, size: Size) -> Work:
        def work() -> object:
            asked_of = matrix(given, size)
            return asked_of @ given.value, asked_of.reduce(*STATISTICS, backend=backend)

        return work

    return prepare


def forward(given: Inputs, size: Size) -> Work:
    """The peer of all."""
    grouped = size.num_kv_heads != size.num_heads

    def work() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*given, is_causal=size.causal, enable_gqa=grouped)

    return work


def flex(given: Inputs, size: Size) -> Work:
    """FlexAttention, compiled, with its logsumexp."""
    torch.compiler.reset()  # it compiles a shape once, and gives up after eight
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    mask: Any = None
    if size.causal:
        mask = regard.Causal().to_block_mask(size.tokens, size.tokens, device=given.query.device)
    options = {"enable_gqa": size.num_kv_heads != size.num_heads, "block_mask": mask}
    return lambda: compiled(*given, **options, return_aux=AuxRequest(lse=True))


def dense(given: Inputs, size: Size) -> Work:
    """The known way to have the same statistics: form scores and weights, and ask them."""
    group = size.num_heads // size.num_kv_heads

    def work() -> object:
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (given.key, given.value))
        scores = (given.query @ key.mT).float() * size.head_dim**-0.5
        if size.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(later, -torch.inf)
        weights = scores.softmax(-1)
        return (
            weights.to(value.dtype) @ value,
            scores.logsumexp(-1),
            torch.special.entr(weights).sum(-1),
            weights.sum(-2),
            weights.topk(8),
            F.adaptive_avg_pool2d(weights, 64),
        )

    return work


SIDES = (
    Side(FORWARD, forward, products=2),
    kernels("logsumexp", lambda _: (regard.LogSumExp(),), goal=0.8),
    kernels("row statistics", rows, goal=0.8),
    kernels("logsumexp, column sums", lambda _: (regard.Sum(-2),), products=2),
    kernels("logsumexp, 64 x 64 map", lambda _: (regard.Pool(64, 64),), products=2),
    kernels("logsumexp, 16 x 16 spans", segments, products=2),
    kernels("logsumexp, transposed product", transposed, products=3),
    kernels("topk(8)", lambda _: (regard.TopK(8),), goal=1.3),
    Side("output and five statistics", everything("triton"), lambda _: STATISTICS, 5, goal=2.5),
    Side(
        "FlexAttention, output and logsumexp",
        flex,
        products=2,
        lengths=COMPILED_AT,
        slow=True,
        first_s=60.0,
    ),
    Side("sweep: row statistics", answers(rows, "sweep"), longest=BLOCKS_UP_TO, slow=True),
    Side(
        "sweep: output and five statistics",
        everything("sweep"),
        products=3,
        longest=BLOCKS_UP_TO,
        slow=True,
    ),
    Side("dense: output and five statistics", dense, products=2, longest=DENSE_UP_TO, slow=True),
)
