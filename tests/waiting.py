"""Refuses to wait for a device: a GPU, or the meta device, which stands for one.

Tensors of the meta device have no numbers: whoever looks at one raises already. What is left are
copies from the CPU that are waited for.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
INDEXED = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)
OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)  # torch.full launches a kernel instead
PLACED = (Tensor.__getitem__, Tensor.__setitem__)
PROTOTYPE = "Synchronization debug mode is a prototype feature"  # PyTorch says so, once


class Waited(Exception):
    """Something was copied from the CPU and waited for."""


class _NoTensorOf(TorchFunctionMode):
    """Numbers of Python that become a tensor on a device are copied and waited for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device") or "cpu"
        numbers: list[Any] = []
        if func in OF_NUMBERS:
            numbers = [args[0]]
        elif func is Tensor.new_tensor:
            device, numbers = args[0].device, [args[1]]
        elif func in PLACED:
            device = args[0].device
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            numbers = [place for place in places if isinstance(place, list)]
        if torch.device(device).type != "cpu" and not all(isinstance(n, Tensor) for n in numbers):
            raise Waited(f"{func.__name__} of {numbers} on {device}")
        return func(*args, **kwargs)


class _NoCopyWaitedFor(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        if func in COPIES:
            copied_into = func is torch.ops.aten.copy_.default
            source: Tensor = args[1] if copied_into else args[0]
            goes_on = kwargs.get("non_blocking", copied_into and any(args[2:]))
            if source.device != answer.device and not goes_on:
                raise Waited(f"a copy from {source.device} to {answer.device}")
        if func in INDEXED:
            places = (each for each in args[1] if each is not None)
            if any(each.device != args[0].device for each in places):
                raise Waited(f"places on another device than {args[0].device}")
        return answer


@contextmanager
def refused() -> Iterator[None]:
    """Inside, every copy that is waited for raises ``Waited``."""
    with _NoTensorOf(), _NoCopyWaitedFor():
        yield


@contextmanager
def refused_by_cuda() -> Iterator[None]:
    """Inside, PyTorch raises where something waits for the GPU; make the tensors before it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", PROTOTYPE, UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """Let no module of regard read a tensor, as if reading made it wait for a device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("regard.") and hasattr(module, "reads_without_sync"):
            patch.setattr(module, "reads_without_sync", lambda _: False)
