"""Autocast: the dtypes that PyTorch's fused attention has inside ``torch.autocast``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_autocast", "autocast_dtype", "without_autocast"]


def autocast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts, or None if it is off or leaves this dtype alone."""
    if not _is_on(device) or not dtype.is_floating_point or dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device.type)


def as_autocast(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor in autocast's dtype if autocast casts it; anything else unchanged.

    Args:
        value: an argument that may be a tensor.
        dtype: the dtype of the result instead of autocast's.
    """
    if not isinstance(value, Tensor):
        return value
    wanted = autocast_dtype(value.dtype, value.device)
    return value if wanted is None else value.to(dtype or wanted)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off, so that statistics accumulate in float32."""
    return torch.autocast(device.type, enabled=False) if _is_on(device) else nullcontext()


def _is_on(device: torch.device) -> bool:
    # PyTorch knows no autocast on the meta device, and raises.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
