"""Autocast: the dtypes that PyTorch's fused attention has inside ``torch.autocast``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts, or None if it is off or leaves this dtype alone."""
    if not _is_on(device) or not dtype.is_floating_point or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device.type)


def as_autocast(query: Any, *others: Any) -> tuple[Any, ...]:
    """Return the arguments, with tensors cast as autocast would cast them.

    Args:
        query: a tensor; autocast must be on for its device, or nothing is cast.
        others: further arguments, which need not be tensors.
    """
    values = (query, *others)
    if not isinstance(query, Tensor) or not _is_on(query.device):
        return values
    return tuple(_cast(value) if isinstance(value, Tensor) else value for value in values)


def _cast(tensor: Tensor) -> Tensor:
    dtype = autocast_dtype(tensor.dtype, tensor.device)
    return tensor if dtype is None else tensor.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off, so that statistics accumulate in float32."""
    return torch.autocast(device.type, enabled=False) if _is_on(device) else nullcontext()


def _is_on(device: torch.device) -> bool:
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)  # PyTorch raises for "meta"
