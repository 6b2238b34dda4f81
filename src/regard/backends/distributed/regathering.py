"""Answers that are computed again for their gradients, so that they keep no gathered keys."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from regard.backends.autograd_limits import first_only, only_backward

__all__ = ["recomputed"]

_Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def recomputed(run: _Run, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return run(tensors); its graph holds the tensors alone, and backward runs it again.

    All ranks must call it in one order, because ``run`` may wait for other ranks.
    """
    return cast(tuple[Tensor, ...], _Recomputed.apply(run, *tensors))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        run: _Run, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(each for each in output if not each.is_floating_point()))
        ctx.set_materialize_grads(False)

    vmap: Any = staticmethod(only_backward)
    jvp: Any = staticmethod(only_backward)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved]
        with torch.enable_grad():
            outputs = cast(_Run, ctx.run)(leaves)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, grad_outputs, strict=True)
            if gradient is not None and output.requires_grad
        ]
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                needed,
                [gradient for _, gradient in pairs],
                materialize_grads=True,
            )
        )
        return None, *(first_only(next(found), saved) if t.requires_grad else None for t in saved)
