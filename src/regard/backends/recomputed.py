"""Answers that are computed again for their gradients, from the tensors that autograd saved."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.backends.autograd_limits import first_only, only_backward
from regard.reductions.template import split

P = TypeVar("P")
_NO_GRAPH = "regard computes its answers again for their gradients"


def recomputed(
    run: Callable[[], Sequence[Tensor]],
    pull_back: Callable[[P, Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor | None]],
    plan: P,
    tensors: Sequence[Tensor],
    saved: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Return ``run()`` as a part of autograd's graph; ``pull_back`` computes its gradients.

    Autograd alone keeps the tensors of the graph, so a checkpoint frees them, and
    ``saved_tensors_hooks`` move them.

    Args:
        run: computes the answers, which are new tensors. It is called once, without gradients.
        pull_back: computes the gradients of ``tensors``, in their order; None stands for zeros. It
            is called with the plan, with ``saved``, and with the gradients of the answers, where
            None stands for zeros, too. The tensors of this plan are leaves, and ``requires_grad``
            is True where a gradient is needed. Gradients are disabled during the call. The graph
            keeps the function itself, so its closure must not hold tensors.
        plan: the arguments that ``pull_back`` needs; see ``map_tensors``.
        tensors: the tensors that gradients flow to. A tensor that occurs twice gets both gradients.
        saved: more tensors that ``pull_back`` needs, such as the norms of all rows. ``run`` may
            write to them, or append them to a list.

    Returns:
        The answers. They have first derivatives only. Answers of integers have none.
    """
    if torch.compiler.is_compiling():
        # A graph cannot hold such a function. The decorator imports Dynamo, so it is applied late.
        outside: Any = torch.compiler.disable(recomputed, reason=_NO_GRAPH)
        return outside(run, pull_back, plan, tensors, saved)
    if not torch.is_grad_enabled():
        plan = cast(P, None)
    template, inputs = split(plan, tensors)
    by_id = {id(tensor): index for index, tensor in enumerate(inputs)}

    def run_checked(*arguments: Tensor) -> tuple[Tensor, ...]:
        if any(argument is not tensor for argument, tensor in zip(arguments, inputs, strict=True)):
            only_backward()  # torch.func unwraps the tensors, so they are other objects
        return tuple(run())

    indices = [by_id[id(tensor)] for tensor in tensors]
    arguments = (run_checked, pull_back, template, indices, saved, *inputs)
    return cast(tuple[Tensor, ...], _Recomputed.apply(*arguments))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        run: Callable[..., tuple[Tensor, ...]], *arguments: Any
    ) -> tuple[Tensor, ...]:
        return run(*arguments[4:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.pull_back, ctx.template, ctx.indices, saved, *tensors = inputs
        # Saving also detects tensors that change in place before backward.
        ctx.save_for_backward(*tensors, *saved)
        ctx.mark_non_differentiable(*(each for each in output if not each.is_floating_point()))
        ctx.set_materialize_grads(False)

    vmap: Any = staticmethod(only_backward)
    jvp: Any = staticmethod(only_backward)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        needed: tuple[bool, ...] = ctx.needs_input_grad[5:]
        inputs, saved = tensors[: len(needed)], tensors[len(needed) :]
        pairs = list(zip(inputs, needed, strict=True))
        plan = ctx.template.filled([x.detach().requires_grad_(is_needed) for x, is_needed in pairs])
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            gradients = ctx.pull_back(plan, saved, grad_outputs)
            for index, gradient in zip(ctx.indices, gradients, strict=True):
                if gradient is not None:
                    gradient = gradient.to(inputs[index].dtype)
                    sums[index] = sums[index] + gradient if index in sums else gradient
        of_inputs = (
            first_only(sums[index] if index in sums else torch.zeros_like(x), inputs)
            if is_needed
            else None
            for index, (x, is_needed) in enumerate(pairs)
        )
        return *(None,) * 5, *of_inputs
