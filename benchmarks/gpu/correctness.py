"""Is what is timed right: the kernels' answers in bfloat16 beside float64, and at full length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from benchmarks.case import LeftOut
from benchmarks.gpu.failures import told
from benchmarks.gpu.sides import SIDES, Questions, loss, matrix
from benchmarks.gpu.size import GOALS_AT, LENGTHS, Size, inputs
from benchmarks.tensors import Inputs
from regard.reductions.products import TransposedOutput

__all__ = ["ALONE", "GRADED", "TIMED", "Checked", "at_length", "check", "checked", "wrong"]

# Tiles end in the middle of the text, and the last of them is nearly empty. Each width with each
# group is compared as it is timed: Triton compiles lengths that 16 divides as kernels of their own.
CHECKED = (
    Size(1021, 128, 8, True),
    Size(1040, 128, 8, False),
    Size(1040, 128, 64, True),
    Size(1040, 64, 8, True),
    Size(1040, 64, 64, False),
)
# In float64 these matrices would take 128 GiB, and 64 times as much.
LONG = (
    Size(GOALS_AT[0], 128, 8, True),
    Size(GOALS_AT[0], 64, 64, False),
    Size(LENGTHS[-1], 128, 8, True),
)
# Statistics accumulate in float32, and the oracle has the same rounded inputs.
TOLERANCE = 1e-4
# Two steps of bfloat16: weights are rounded to be multiplied with an operand in it, and the answer.
ROUNDED = 2 * 2**-8

# By the name of the side, and as it is timed.
TIMED: dict[str, Questions] = {side.name: side.asked for side in SIDES if side.asked is not None}
# What people ask by itself and nobody times; the last so that its answer is not rounded.
ALONE: dict[str, Questions] = {
    "entropy": lambda _: (regard.Entropy(),),
    "top-1": lambda _: (regard.TopK(1),),
    "transposed product, float32": lambda given: (TransposedOutput(given.query.float()),),
}

# By the name of the side; their gradients are compared.
GRADED: dict[str, Questions] = {side.name: side.graded for side in SIDES if side.graded is not None}
Answer = Tensor | tuple[Tensor, Tensor]
# The error, and whether all is right.
Compare = Callable[[Inputs, Size], tuple[float, bool]]


class Checked(NamedTuple):
    """The answers to some questions beside the exact ones.

    Attributes:
        name: of the side that asks them.
        size: of which matrix.
        error: the norm of the difference over that of the exact answer, the largest; None: there
            was no answer.
        right: whether it is small, and the same keys were found.
        failed: what came instead of an answer.
    """

    name: str
    size: Size
    error: float | None
    right: bool
    failed: str | None = None


def check(device: str, backend: str = "triton") -> Iterator[Checked]:
    """Each question of some kinds of matrix; each kind takes seconds to compile."""
    yield from checked(CHECKED[0], TIMED | ALONE, device, backend)
    for size in CHECKED[1:]:
        yield from checked(size, TIMED, device, backend)
    for name, questions in GRADED.items():
        yield _checked(name, CHECKED[0], device, _gradients_beside_dense(questions, backend))
    for size in LONG:
        yield from at_length(size, device, backend)


def wrong(checks: Sequence[Checked], name: str, size: Size) -> bool:
    """Whether the kernels that a side takes at this size were found wrong, at whatever length."""
    return any(
        not each.right and each.name == name and each.size.of_heads == size.of_heads
        for each in checks
    )


def checked(
    size: Size, asked: Mapping[str, Questions], device: str, backend: str
) -> Iterator[Checked]:
    """What is asked of one matrix, beside float64."""
    for name, questions in asked.items():
        yield _checked(name, size, device, _beside_dense(questions, backend))


def at_length(size: Size, device: str, backend: str) -> Iterator[Checked]:
    """What is known of a matrix that is too large for float64."""

    def logsumexp(given: Inputs, size: Size) -> tuple[float, bool]:
        found = matrix(given, size).reduce(regard.LogSumExp(), backend=backend)
        return _compared(found, flash_logsumexp(given, size))

    def column_sums(given: Inputs, size: Size) -> tuple[float, bool]:
        """The weights of each query sum to 1."""
        total = matrix(given, size).reduce(regard.Sum(-2), backend=backend).double().sum(-1)
        return _compared(total, torch.full_like(total, size.tokens))

    yield _checked("logsumexp", size, device, logsumexp)
    yield _checked("logsumexp, column sums", size, device, column_sums)


def flash_logsumexp(given: Inputs, size: Size) -> Tensor:
    """By PyTorch's flash attention, which keeps it for the backward pass."""
    group = size.num_heads // size.num_kv_heads
    key, value = (each.repeat_interleave(group, dim=1) for each in (given.key, given.value))
    aten: Any = torch.ops.aten
    on_gpu = given.query.is_cuda
    flash = aten._scaled_dot_product_flash_attention
    flash = flash if on_gpu else aten._scaled_dot_product_flash_attention_for_cpu
    return flash(given.query, key, value, is_causal=size.causal)[1]


def _checked(name: str, size: Size, device: str, compare: Compare) -> Checked:
    try:
        with _poisoned_memory(), told():
            (given,) = inputs(size, device, sets=1)
            error, right = compare(given, size)
    except LeftOut as reason:
        return Checked(name, size, None, False, str(reason))
    return Checked(name, size, error, right)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Memory that nobody wrote is full of NaN."""
    # Some operation of the exact way may have no deterministic kernel, which does not matter here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _beside_dense(asked_for: Questions, backend: str) -> Compare:
    def compare(given: Inputs, size: Size) -> tuple[float, bool]:
        questions, of_size = asked_for(given), matrix(given, size)
        found = of_size.reduce(*questions, backend=backend)
        answers = found if len(questions) > 1 else (found,)
        # One by one: float64 takes much memory.
        exact = (of_size.reduce(question, backend="dense") for question in questions)
        compared = [_compared(one, other) for one, other in zip(answers, exact, strict=True)]
        largest = torch.tensor([error for error, _ in compared]).max()  # Python's passes over NaN
        return float(largest), all(right for _, right in compared)

    return compare


def _gradients_beside_dense(asked_for: Questions, backend: str) -> Compare:
    def gradients(given: Inputs, size: Size, name: str) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in given[:2]]
        answers = matrix(Inputs(*leaves, given.value), size).reduce(*asked_for(given), backend=name)
        return torch.autograd.grad(loss(answers), leaves)

    def compare(given: Inputs, size: Size) -> tuple[float, bool]:
        pairs = zip(gradients(given, size, backend), gradients(given, size, "dense"), strict=True)
        error = max(_error(found, exact.double()) for found, exact in pairs)
        return error, error <= ROUNDED

    return compare


def _compared(found: Answer, exact: Answer) -> tuple[float, bool]:
    if isinstance(found, Tensor) and isinstance(exact, Tensor):
        error = _error(found, exact)
        return error, error <= (ROUNDED if found.dtype == torch.bfloat16 else TOLERANCE)
    (values, keys), (exact_values, exact_keys) = found, exact
    error = _error(values, exact_values)
    # Two scores that float32 does not tell apart may stand in either order.
    same = float((keys == exact_keys).double().mean())
    return error, error <= TOLERANCE and same >= 1 - TOLERANCE


def _error(found: Tensor, exact: Tensor) -> float:
    """NaN where either has one, and then nothing is right."""
    difference = found.double() - exact
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(exact))
