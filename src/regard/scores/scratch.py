"""Scratch memory that consecutive blocks reuse."""

import mmap
import sys
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_HUGE_PAGE = 2**21  # bytes


class Scratch:
    """Memory that consecutive blocks reuse.

    Allocating new pages for each block would take longer than its arithmetic.

    Attributes:
        capacity: the number of elements to allocate for a new tensor, at least; ``take`` may need
            more.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._tensors: dict[str, Tensor] = {}

    def take(
        self, name: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialised tensor of this shape, valid until the name is taken again."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < prod(size):
            tensor = _fresh(max(self.capacity, prod(size)), dtype, device)
            self._tensors[name] = tensor
        return tensor[: prod(size)].view(size)


def _fresh(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory for `count` numbers, in huge pages where Linux has them."""
    size = -(-count * dtype.itemsize // _HUGE_PAGE) * _HUGE_PAGE
    if sys.platform != "linux" or device.type != "cpu" or size <= _HUGE_PAGE:
        return torch.empty(count, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory; torch's error says how much it was
        return torch.empty(count, dtype=dtype, device=device)
    with suppress(OSError):  # the operating system may not support huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
