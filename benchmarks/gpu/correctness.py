"""The kernels' answers on the GPU in bfloat16 beside those of float64, before anything is timed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import regard
from benchmarks.gpu.sides import matrix
from benchmarks.gpu.size import Size, inputs
from benchmarks.questions import spans
from benchmarks.tensors import Inputs
from regard.products import TransposedOutput

__all__ = ["Checked", "asked", "check", "checked"]

# Tiles end in the middle of the text, and the last of them is nearly empty. Each width with each
# group is compared as it is timed: Triton compiles lengths that 16 divides as kernels of their own.
CHECKED = (
    Size(1021, 128, 8, True),
    Size(1040, 128, 8, False),
    Size(1040, 128, 64, True),
    Size(1040, 64, 8, True),
    Size(1040, 64, 64, False),
)
# Statistics accumulate in float32, and the oracle has the same rounded inputs.
TOLERANCE = 1e-4


def asked(given: Inputs) -> dict[str, regard.Reduction]:
    """Every kernel, alone."""
    return {
        "logsumexp": regard.LogSumExp(),
        "entropy": regard.Entropy(),
        "max": regard.Max(),
        "topk(8)": regard.TopK(8),
        "column sums": regard.Sum(-2),
        "64 x 64 map": regard.Pool(64, 64),
        "spans": regard.Segments(spans(given.tokens)),
        # float32, so that the answer is not rounded to the operand's bfloat16
        "transposed": TransposedOutput(given.query.float()),
    }


class Checked(NamedTuple):
    """One answer beside the exact one.

    Attributes:
        name: what was asked.
        size: of which matrix.
        error: the norm of the difference over that of the exact answer.
        right: whether it is small, and the same keys were found.
    """

    name: str
    size: Size
    error: float
    right: bool


def check(device: str, backend: str = "triton") -> Iterator[Checked]:
    """Each question of some kinds of matrix; each kind takes seconds to compile."""
    for size in CHECKED:
        yield from checked(size, device, backend)


def checked(size: Size, device: str, backend: str) -> Iterator[Checked]:
    """Each question of one matrix, with memory that nobody wrote full of NaN."""
    (given,) = inputs(size, device, sets=1)
    asked_of = matrix(given, size)
    # Some operation of the exact way may have no deterministic kernel, which does not matter here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name, reduction in asked(given).items():
            (exact,) = _answers(asked_of, [reduction], "dense")
            (found,) = _answers(asked_of, [reduction], backend)
            yield Checked(name, size, *_compared(found, exact))
    finally:
        torch.use_deterministic_algorithms(False)


def _answers(
    asked_of: regard.AttentionMatrix, reductions: Sequence[regard.Reduction], backend: str
) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
    return (asked_of.reduce(reduction, backend=backend) for reduction in reductions)


def _compared(
    found: Tensor | tuple[Tensor, Tensor], exact: Tensor | tuple[Tensor, Tensor]
) -> tuple[float, bool]:
    if isinstance(found, Tensor) and isinstance(exact, Tensor):
        error = _error(found, exact)
        return error, error <= TOLERANCE
    (values, keys), (exact_values, exact_keys) = found, exact
    error = _error(values, exact_values)
    # Two scores that float32 does not tell apart may stand in either order.
    same = float((keys == exact_keys).double().mean())
    return error, error <= TOLERANCE and same >= 1 - TOLERANCE


def _error(found: Tensor, exact: Tensor) -> float:
    """NaN where either has one, and then nothing is right."""
    difference = found.double() - exact
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(exact))
