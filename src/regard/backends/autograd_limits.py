"""Clear errors for the transforms of autograd that recomputed answers do not support."""

from collections.abc import Iterable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor


def first_only(gradient: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the gradient; differentiating it again raises an error instead of giving 0.

    Args:
        gradient: the gradient of a loss.
        inputs: the tensors that the gradient was computed from.
    """
    return cast(Tensor, _Once.apply(gradient, *inputs))


def only_backward(*_: Any) -> NoReturn:
    """Raise the error for vmap, jvp and other transforms, whatever the arguments are.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "an answer of regard is under torch.func or forward-mode AD; it has a backward pass only.\n"
        "    Use torch.autograd.grad; instead of vmap give query and key a batch axis."
    )


def refuse_vmap(tensors: Iterable[Tensor]) -> None:
    """Raise an error if ``torch.vmap`` maps over one of the tensors, which then has no numbers.

    Raises:
        RuntimeError: one of the tensors is mapped over.
    """
    functorch = cast(Any, torch)._C._functorch
    for tensor in tensors:
        while functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                only_backward()
            tensor = functorch.get_unwrapped(tensor)  # a wrapper of torch.func.grad inside vmap


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(*_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "an answer of regard was differentiated twice; it has first derivatives only.\n"
            "    Ask with backend='dense', or leave out create_graph=True."
        )
