"""MiB that a question adds to the process at its peak, from Linux's own account of it."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import regard
from benchmarks.case import Case, Measured

__all__ = ["CASES"]

TOKENS, HEAD_DIM = 32_768, 64
GOAL_MIB = 300
MIB = 2**20

Ask = Callable[[regard.AttentionMatrix], Any]

QUESTIONS: dict[str, Ask] = {
    "entropy": lambda a: a.entropy(),
    "sum(-2)": lambda a: a.sum(-2),
    "topk(8)": lambda a: a.topk(8).values,
    "pool(512, 512)": lambda a: a.pool(512, 512),
}


def resident() -> tuple[float, float]:
    """MiB in memory now, and at the peak since the last `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))


def forget_peak() -> None:
    """Let the peak start anew from what is in memory now (Linux, proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def warm_up() -> None:
    """Start PyTorch's threads and load its kernels, forward and backward, without regard."""
    x = torch.randn(1, 1, 256, HEAD_DIM, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
    (x @ x.mT).softmax(-1).sum().backward()


def added(ask: Ask, gradient: bool) -> Callable[[bool], Measured]:
    """How to measure it, at full or at tiny size."""

    def measure(quick: bool) -> Measured:
        tokens = 96 if quick else TOKENS
        torch.manual_seed(0)
        query, key = torch.randn(2, tokens, HEAD_DIM)
        query.requires_grad_(gradient)
        key.requires_grad_(gradient)
        warm_up()
        gc.collect()
        forget_peak()
        before, _ = resident()
        answer = ask(regard.attend(query, key))
        if gradient:
            answer.backward(torch.ones_like(answer))
        _, peak = resident()
        return Measured(peak - before, beside=f"the matrix {tokens**2 * 4 / MIB:,.0f} MiB")

    return measure


CASES = tuple(
    Case(
        "memory",
        f"gradient of {name}" if gradient else name,
        "MiB",
        added(ask, gradient),
        goal=GOAL_MIB,
    )
    for gradient in (False, True)
    for name, ask in QUESTIONS.items()
)
