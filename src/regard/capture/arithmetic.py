"""The operations of arithmetic, element by element: with a tensor or a number, new or in place.

Python runs the overload for tensors, ``aten.mul.Tensor``, with a number, too; TorchScript runs
``aten.mul.Scalar``.
"""

from typing import Any

import torch

from regard.tracing.tracer import Operation

__all__ = ["DIFFERENCES", "MULTIPLICATIONS", "QUOTIENTS", "SUMS", "alpha_of"]


def _overloads(*names: str) -> tuple[Any, ...]:
    packets = (getattr(torch.ops.aten, name) for name in names)
    return tuple(each for packet in packets for each in (packet.Tensor, packet.Scalar))


SUMS = _overloads("add", "add_")
DIFFERENCES = _overloads("sub", "sub_", "subtract", "subtract_")
MULTIPLICATIONS = _overloads("mul", "mul_", "multiply", "multiply_")
QUOTIENTS = _overloads("div", "div_", "divide", "divide_", "true_divide", "true_divide_")


def alpha_of(operation: Operation) -> float:
    """What a sum or a difference multiplies its second part with.

    Example:
        >>> import torch
        >>> from regard.capture.arithmetic import SUMS, alpha_of
        >>> from regard.tracing.tracer import Operation
        >>> alpha_of(Operation(SUMS[0], (torch.ones(1), torch.ones(1)), {"alpha": 2}, None, {}.get))
        2.0
    """
    given = operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("alpha", 1)
    return float(given)
