"""Refuses to wait for a device, on tensors of the meta device, which stands for one.

Its tensors have no numbers: whoever looks at one raises already. What is left are copies from the
CPU that are waited for.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Waited(Exception):
    """Something was copied from the CPU and waited for."""


class _NoTensorOf(TorchFunctionMode):
    """torch.tensor(numbers, device=...) copies them and waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise Waited(f"torch.tensor({args[0]}, device=...)")
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
        return answer


@contextmanager
def refused() -> Iterator[None]:
    """Inside, every copy that is waited for raises ``Waited``."""
    with pytest.MonkeyPatch.context() as patch, _NoTensorOf(), _NoCopyWaitedFor():
        # PyTorch knows no autocast on the meta device.
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        yield
