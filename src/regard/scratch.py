"""Memory that one block of the matrix after another uses again."""

import mmap
import sys
from contextlib import suppress
from functools import cached_property
from math import prod

import torch
from torch import Tensor

__all__ = ["Scratch"]

_HUGE_PAGE = 2**21  # bytes


class Scratch:
    """Memory that one block after another uses again: fresh pages cost more than the arithmetic.

    Attributes:
        room: how many numbers a tensor usually holds at most.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._held: dict[str, Tensor] = {}

    @cached_property
    def another(self) -> "Scratch":
        """Scratch for a second block that lives at the same time."""
        return Scratch(self.room)

    def take(
        self, name: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of this shape with unspecified content, valid until the name is taken again."""
        return self._part(name, size, dtype, device, self.room)

    def converted(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in this dtype: itself, or valid until the name is taken again."""
        if tensor.dtype == dtype:
            return tensor
        return self._part(name, tuple(tensor.shape), dtype, tensor.device, 0).copy_(tensor)

    def _part(
        self,
        name: str,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        room: int,
    ) -> Tensor:
        count = prod(size)
        held = self._held.get(name)
        if held is None or held.numel() < count:
            grown = 0 if held is None else 2 * held.numel()
            held = self._held[name] = _fresh(max(room, count, grown), dtype, device)
        return held[:count].view(size)


def _fresh(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for so many numbers; where Linux has them, in pages that come 512 at once."""
    size = -(-count * dtype.itemsize // _HUGE_PAGE) * _HUGE_PAGE
    if sys.platform != "linux" or device.type != "cpu" or size <= _HUGE_PAGE:
        return torch.empty(count, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory; torch's error says how much it was
        return torch.empty(count, dtype=dtype, device=device)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
