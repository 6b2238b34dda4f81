"""Recorded matrices that are part of the model's autograd graph."""

import sys
from inspect import currentframe
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from regard.capture.storages import storage_key, tensors_in
from regard.matrix.attention_matrix import AttentionMatrix
from regard.tracing.tracer import Operation


class GraphTensors:
    """The tensors in the model's autograd graph that were inputs of operations.

    A view that is made without gradients is not connected to the graph. It is matched with one of
    these tensors by the memory that they share. The tensors are referenced weakly.
    """

    def __init__(self) -> None:
        self._by_storage: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def note(self, operation: Operation) -> None:
        """Record the arguments of an operation that runs with gradients."""
        for tensor in tensors_in((operation.args, tuple(operation.kwargs.values()))):
            storage = storage_key(tensor) if tensor.requires_grad else None
            if storage is not None:
                root = tensor if tensor._base is None else tensor._base
                self._by_storage[storage] = root

    def matrix(self, copied: AttentionMatrix, part: AttentionMatrix) -> AttentionMatrix:
        """Return a matrix of copies through which gradients flow to the tensors of ``part``."""
        pairs = zip(copied.source.tensors, part.source.tensors, strict=True)
        linked = {id(copy): self.linked(copy, own) for copy, own in pairs}
        return AttentionMatrix(copied.source.map(lambda copy: linked[id(copy)]), copied.mask)

    def linked(self, copied: Tensor, own: Tensor) -> Tensor:
        """Connect a copy to the model's own tensor, so that gradients flow to it.

        Call it with gradients enabled, right after the model has used the tensor. The copy is
        returned unchanged if the tensor needs no gradient.
        """
        root = self._by_storage.get(storage_key(own) or 0)
        if own.grad_fn is None and root is not None and root is not own and root.dtype == own.dtype:
            own = root.as_strided(own.shape, own.stride(), own.storage_offset())
        return cast(Tensor, _Linked.apply(own, copied)) if own.requires_grad else copied


def alters_gradient(tensor: Tensor) -> bool:
    """Return True if a hook, or a backward function of the user's own, gets the gradient first."""
    return bool(tensor._backward_hooks) or isinstance(tensor.grad_fn, BackwardCFunction)


class _Linked(torch.autograd.Function):
    """An autograd function that returns a copy and passes its gradient to the original tensor."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        _ctx: Any, _own: Tensor, copied: Tensor
    ) -> Tensor:
        return copied.detach()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        _ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return gradient, None


def is_checkpointed_without_graph() -> bool:
    """Return True inside a reentrant checkpoint, whose graph is built in the backward pass alone.

    The result is False for one that has no backward pass, as under ``torch.no_grad``.
    """
    checkpoints = sys.modules.get("torch.utils.checkpoint")
    if checkpoints is None:
        return False
    reentrant, frame = checkpoints.CheckpointFunction.forward.__code__, currentframe()
    while frame is not None and frame.f_code is not reentrant:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["ctx"].next_functions)
