"""The ways to an answer that are compared, each as a function from tensors to what is timed."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from benchmarks.case import LeftOut, need
from benchmarks.patterns import EVERYTHING, WIDTH, Pattern
from benchmarks.questions import ALL, OUTPUT, QUESTIONS, Ask, everything
from benchmarks.tensors import HEAD_DIM, Inputs
from benchmarks.turns import Work

__all__ = ["SIDES", "Prepare", "Side", "asked", "backward", "compiled_flex", "forward", "near"]

# Does what is done once, compiling above all, and gives what is done each time.
Prepare = Callable[[Inputs], Work]

SCALE = HEAD_DIM**-0.5
# The other questions cost about what the entropy does; the group "speed" has all of them.
COMPARED = (OUTPUT, "entropy", "topk(8)", ALL)


@dataclass(frozen=True)
class Side:
    """A side of the comparison over all lengths.

    Attributes:
        prepare: does what is done once, and gives the work.
        dense: how many matrices of length x length it holds at once.
        compiles: whether preparing takes seconds that are worth a note.
    """

    prepare: Prepare
    dense: int = 0
    compiles: bool = False


def forward(pattern: Pattern = EVERYTHING) -> Prepare:
    """The peer of all: one fused forward."""

    def prepare(inputs: Inputs) -> Work:
        mask = pattern.theirs(inputs.tokens)
        return lambda: F.scaled_dot_product_attention(
            *inputs, attn_mask=mask, is_causal=pattern.causal
        )

    return prepare


def asked(ask: Ask, pattern: Pattern = EVERYTHING) -> Prepare:
    """A question to regard; making the matrix is a part of it."""

    def prepare(inputs: Inputs) -> Work:
        mask = pattern.ours(inputs.tokens)
        return lambda: ask(regard.attend(inputs.query, inputs.key, mask=mask), inputs.value)

    return prepare


def swept(inputs: Inputs) -> Work:
    """The output and five statistics by the backend "sweep", without compiled kernels."""
    return lambda: everything(regard.attend(inputs.query, inputs.key), inputs.value, "sweep")


def backward(prepare: Prepare) -> Prepare:
    """The backward pass alone, of the one tensor that another side gives."""

    def prepared(inputs: Inputs) -> Work:
        leaves = Inputs(*(tensor.detach().requires_grad_() for tensor in inputs))
        answer: Any = prepare(leaves)()
        ones = torch.ones_like(answer)
        return lambda: torch.autograd.grad(
            answer, leaves, ones, retain_graph=True, allow_unused=True
        )

    return prepared


def eager(inputs: Inputs) -> Work:
    """The known way to have the weights: form them."""

    def work() -> object:
        weights = (inputs.query @ inputs.key.mT * SCALE).softmax(-1)
        return weights @ inputs.value, weights

    return work


def eager_statistics(inputs: Inputs) -> Work:
    """The known way to have the same five statistics: of scores and weights, one by one."""

    def work() -> object:
        scores = inputs.query @ inputs.key.mT * SCALE
        weights = scores.softmax(-1)
        return (
            weights @ inputs.value,
            scores.logsumexp(-1),
            torch.special.entr(weights).sum(-1),
            weights.sum(-2),
            weights.topk(8),
            F.adaptive_avg_pool2d(weights, 64),
        )

    return work


def anywhere(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """FlexAttention's word for patterns.EVERYTHING."""
    return q_idx >= 0


def near(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    """FlexAttention's word for patterns.WINDOW."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WIDTH)


def compiled_flex(visible: Callable[..., Tensor] = anywhere) -> Prepare:
    """FlexAttention, compiled: uncompiled it forms the matrix; a CPU gives the output only.

    It has a mask also where all is seen: without one its kernel takes the whole matrix for one
    block, and forms it.
    """

    def prepare(inputs: Inputs) -> Work:
        if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
            raise LeftOut("no C++ compiler, which FlexAttention needs on a CPU")
        flex: Any = torch.compile(flex_attention)
        blocks = create_block_mask(visible, None, None, inputs.tokens, inputs.tokens, device="cpu")

        def work() -> object:
            return flex(*inputs, block_mask=blocks)

        work()
        return work

    return prepare


def keops(inputs: Inputs) -> Work:
    """The logsumexp by KeOps, which compiles one formula for each question."""
    need("pykeops")
    lazy: Any = import_module("pykeops.torch").LazyTensor
    query, key = inputs.query[..., :, None, :], inputs.key[..., None, :, :]

    def work() -> object:
        return ((lazy(query) * lazy(key)).sum(-1) * SCALE).logsumexp(axis=3)

    work()
    return work


SIDES = {
    "fused forward (SDPA)": Side(forward()),
    **{f"regard: {name}": Side(asked(QUESTIONS[name].ask)) for name in COMPARED},
    f"regard, in plain PyTorch: {ALL}": Side(swept),
    "eager: output and weights": Side(eager, dense=3),
    "eager: output and five statistics": Side(eager_statistics, dense=4),
    "FlexAttention, compiled: output": Side(compiled_flex(), compiles=True),
    "KeOps: logsumexp": Side(keops, compiles=True),
}
