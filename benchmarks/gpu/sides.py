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
from regard.reductions.divergences import KullbackLeibler
from regard.reductions.products import TransposedOutput

__all__ = ["BOTH", "FORWARD", "SIDES", "STATISTICS", "Questions", "Side", "loss", "matrix"]

Prepare = Callable[[Inputs, Size], Work]
Questions = Callable[[Inputs], tuple[regard.Reduction, ...]]

FORWARD = "forward, cuDNN through SDPA"
BOTH = "forward and backward, cuDNN through SDPA"
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
        graded: what it asks of regard's kernels with gradients, which have to be right.
        peer: the side that the goal counts in.
        goal: at most so many times the peer, at the size of the goals.
        lengths: only these; None: all.
        longest: at most so many tokens.
        causal: whether it is measured with a causal mask alone.
        slow: whether it takes so long that one head_dim and one number of key heads have to do.
        first_s: seconds that may have to be left for its first size, at which it compiles.
    """

    name: str
    prepare: Prepare
    asked: Questions | None = None
    products: int = 1
    graded: Questions | None = None
    peer: str = FORWARD
    goal: float | None = None
    lengths: tuple[int, ...] | None = None
    longest: int | None = None
    causal: bool = False
    slow: bool = False
    first_s: float = 15.0

    def leaves_out(self, size: Size) -> str | None:
        """Why it is not measured at a size."""
        if self.lengths is not None and size.tokens not in self.lengths:
            return f"measured at {', '.join(f'{n:,}' for n in self.lengths)} only"
        if self.longest is not None and size.tokens > self.longest:
            return f"measured up to {self.longest:,}"
        if self.causal and not size.causal:
            return "measured with a causal mask"
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
    return Side(name, answers(asked, "triton"), asked, products=products, goal=goal)


def gradients(
    name: str, asked: Questions, goal: float | None = None, *, causal: bool = False
) -> Side:
    """A loss of an answer, and its gradients, by regard's kernels."""

    def prepare(given: Inputs, size: Size) -> Work:
        leaves = [tensor.detach().requires_grad_() for tensor in given[:2]]
        with_leaves = Inputs(*leaves, given.value)

        def work() -> object:
            answers = matrix(with_leaves, size).reduce(*asked(given), backend="triton")
            return torch.autograd.grad(loss(answers), leaves)

        return work

    return Side(name, prepare, graded=asked, products=6, peer=BOTH, goal=goal, causal=causal)


def loss(answers: Any) -> torch.Tensor:
    """A number that depends on each entry of the answers in its own way."""
    found = answers if isinstance(answers, tuple) else (answers,)
    return torch.stack([(each.float() * each.float().cos()).sum() for each in found]).sum()


def masked(name: str, mask: Callable[[Inputs], Any], *, once: bool, goal: float | None) -> Side:
    """The logsumexp under a mask of bits, which are evaluated in each call or once."""

    def prepare(given: Inputs, _: Size) -> Work:
        def matrix() -> regard.AttentionMatrix:
            return regard.attend(given.query, given.key, mask=mask(given))

        first = matrix()
        return lambda: (first if once else matrix()).reduce(regard.LogSumExp(), backend="triton")

    return Side(name, prepare, goal=goal, longest=GOALS_AT[0], causal=True)


def causal_mod(_: Inputs) -> Any:
    """A mask_mod that says what the kernels know as causal."""
    return lambda _b, _h, q_idx, kv_idx: q_idx >= kv_idx


def window_or_first(given: Inputs) -> Any:
    """A window, and the first keys."""
    first = torch.arange(given.tokens, device=given.key.device) < 64
    return regard.SlidingWindow(4095, 0) | regard.Keep(first)


def rows(_: Inputs) -> tuple[regard.Reduction, ...]:
    """In one pass, and the best group of keys once more."""
    return regard.LogSumExp(), regard.MaxScore(), regard.Entropy(), regard.TopK(1)


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


def forward(given: Inputs, size: Size) -> Callable[[], torch.Tensor]:
    """The peer of all."""
    grouped = size.num_kv_heads != size.num_heads

    def work() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*given, is_causal=size.causal, enable_gqa=grouped)

    return work


def both(given: Inputs, size: Size) -> Work:
    """The peer of all gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    again = forward(Inputs(*leaves), size)
    arriving = torch.randn_like(given.query)
    return lambda: torch.autograd.grad([again()], leaves, [arriving])


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


def entropy(_: Inputs) -> tuple[regard.Reduction, ...]:
    return (regard.Entropy(),)


def column_sums(_: Inputs) -> tuple[regard.Reduction, ...]:
    return (regard.Sum(-2),)


def pooled(_: Inputs) -> tuple[regard.Reduction, ...]:
    return (regard.Pool(64, 64),)


def divergence(given: Inputs) -> tuple[regard.Reduction, ...]:
    """From a causal matrix whose heads have the keys of others."""
    other = regard.attend(given.query, given.key.roll(1, 1), mask=regard.Causal())
    return (KullbackLeibler(other.source, other.mask),)


SIDES = (
    Side(FORWARD, forward, products=2),
    Side(BOTH, both, products=7),
    kernels("logsumexp", lambda _: (regard.LogSumExp(), regard.MaxScore()), goal=0.6),
    kernels("row statistics", rows, goal=0.8),
    kernels("logsumexp, column sums", column_sums, products=2, goal=1.3),
    kernels("logsumexp, 64 x 64 map", pooled, products=2, goal=1.3),
    kernels("logsumexp, 16 x 16 spans", segments, products=2),
    kernels("logsumexp, transposed product", transposed, products=3),
    kernels("topk(8)", lambda _: (regard.TopK(8),), goal=1.5),
    gradients("entropy and its gradient", entropy, goal=1.3),
    gradients("column sums and their gradient", column_sums, goal=1.5),
    gradients("64 x 64 map and its gradient", pooled, goal=1.5),
    gradients("Kullback-Leibler divergence and its gradient", divergence, causal=True),
    masked("logsumexp, a new mask_mod", causal_mod, once=False, goal=1.2),
    masked("logsumexp, the same mask_mod", causal_mod, once=True, goal=None),
    masked("logsumexp, a new A | B", window_or_first, once=False, goal=1.2),
    Side(
        "output and five statistics",
        everything("triton"),
        lambda _: STATISTICS,
        products=5,
        goal=2.5,
    ),
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
