"""What answers that are computed twice for their gradients cannot do, said in our words."""

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["first_only", "only_backward"]


def first_only(gradient: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """A gradient whose own gradient, with respect to the inputs, is an error and not 0."""
    return cast(Tensor, _Once.apply(gradient, *inputs))


def only_backward(*_: Any) -> Any:
    """What stands for vmap and jvp.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "an answer of regard is under torch.func or forward-mode AD; it has a backward pass only.\n"
        "    Use torch.autograd.grad; instead of vmap give query and key a batch axis."
    )


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, gradient: Tensor, *_: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(*_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "an answer of regard was differentiated twice; it has first derivatives only.\n"
            "    Ask with backend='dense', or leave out create_graph=True."
        )
