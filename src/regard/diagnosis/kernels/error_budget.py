"""The error of a kernel, beside that of plain PyTorch in the same dtype.

An output may be off by twice the error of plain PyTorch, plus one rounding. The errors of a row are
measured by the size of what it sums, so that a small row is not judged by a large one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.diagnosis.kernels.cases import Inputs
from regard.diagnosis.kernels.standard import Standard


@dataclass(frozen=True)
class Error:
    """An error, relative to the size of the exact numbers.

    Attributes:
        actual: that of the kernel; NaN if its numbers are not finite where they should be.
        plain: that of plain PyTorch.
        allowed: the largest one that is right.
    """

    actual: float
    plain: float
    allowed: float

    @property
    def share(self) -> float:
        """The error as a share of what is allowed."""
        return self.actual / self.allowed

    @property
    def is_allowed(self) -> bool:
        """True if the kernel is right."""
        return self.actual <= self.allowed


def judged_rows(standard: Standard, inputs: Inputs) -> Tensor:
    """Return which rows of an output are judged, (q_len, 1): those that see no key of NaN."""
    q_len, kv_len = inputs.query.shape[-2], inputs.key.shape[-2]
    visible = standard.visible(q_len, kv_len, torch.device("cpu"))
    return ~(visible & inputs.key[0, 0].isnan().any(-1)).any(-1, keepdim=True)


def output_error(standard: Standard, inputs: Inputs, output: Tensor, device: torch.device) -> Error:
    """Return the error of an output.

    Rows that see a key of NaN are left out. Rows that see no key are 0, or the mean of all values,
    as where a finite number masks them.

    Args:
        standard: the attention that it should be.
        inputs: of the kernel, in its dtype, on the CPU.
        output: (batch, heads, q_len, head_dim) in float64, on the CPU.
        device: where plain PyTorch runs.
    """
    wide = inputs.to("cpu", torch.float64)
    q_len, kv_len = wide.query.shape[-2], wide.key.shape[-2]
    visible = standard.visible(q_len, kv_len, torch.device("cpu"))
    has_keys = visible.any(-1, keepdim=True)
    is_judged = judged_rows(standard, inputs)
    exact = standard.output(wide.query, wide.key, wide.value)
    size = standard.size(wide.query, wide.key, wide.value)
    largest = wide.value.abs().max()
    size = torch.where(has_keys, size, largest)
    mean = Standard(None).output(wide.query * 0, wide.key.nan_to_num(), wide.value)
    eps = torch.finfo(inputs.query.dtype).eps
    is_mean = ((output - mean).abs() <= 4 * eps * largest).all(-1, keepdim=True)
    output = torch.where(~has_keys & is_mean, exact, output)
    there = inputs.to(device, inputs.query.dtype)
    plain = standard.output(there.query, there.key, there.value).double().cpu()

    def error(numbers: Tensor) -> float:
        return float(torch.where(is_judged, (numbers - exact).abs() / size, 0.0).max())

    return _error(standard, inputs, error(output), error(plain))


def gradient_errors(
    standard: Standard, inputs: Inputs, gradients: Sequence[Tensor], device: torch.device
) -> list[Error]:
    """Return the errors of the gradients of query, key and value, each of its largest number.

    Rows that see no key have no gradient, whatever their output is.

    Args:
        standard: the attention that it should be.
        inputs: of the kernel, with the gradient of its output.
        gradients: in float64, on the CPU.
        device: where plain PyTorch runs.
    """
    wide = inputs.to("cpu", torch.float64)
    there = inputs.to(device, inputs.query.dtype)
    errors: list[Error] = []
    both = zip(_gradients(standard, wide), _gradients(standard, there), strict=True)
    for (exact, plain), gradient in zip(both, gradients, strict=True):
        size = float(exact.abs().max()) or 1.0
        found, of_plain = (
            float((t.double().cpu() - exact).abs().max()) / size for t in (gradient, plain)
        )
        errors.append(_error(standard, inputs, found, of_plain))
    return errors


def _gradients(standard: Standard, inputs: Inputs) -> tuple[Tensor, ...]:
    leaves = [t.requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    return torch.autograd.grad(standard.output(*leaves), leaves, inputs.upstream)


def _error(standard: Standard, inputs: Inputs, actual: float, plain: float) -> Error:
    """Return an error with what is allowed.

    On a few numbers plain PyTorch has no error by luck, so what the rounding of a score in the
    dtype of sums costs is allowed whatever its error was.
    """
    dtype = inputs.query.dtype
    sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    scores = standard.scores(inputs.query.double(), inputs.key.double().nan_to_num())
    of_scores = 2 * sums * (1 + float(scores.abs().max()))
    return Error(actual, plain, 2 * plain + torch.finfo(dtype).eps + of_scores)
