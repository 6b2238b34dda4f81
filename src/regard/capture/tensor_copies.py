"""Copies of a model's tensors: on the same device, on another one, or in a spool."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.recording.layers import InMemory
from regard.recording.merged_calls import Columns, MemoryColumns, SpooledColumns
from regard.recording.spool import Spool


class TensorCopies:
    """A maker of copies of tensors that share no memory with the originals.

    A copy from or to the CPU is synchronous, because the CPU may use both tensors at once. A copy
    between other devices is asynchronous, because later work on these devices runs after it.

    Args:
        device: the device of the copies; None keeps each copy on the device of its original.
        spool: the spool that has the copies; None keeps them in memory. Masks and biases, which
            layers share, stay in memory.

    Attributes:
        device: the device of the copies.
        spool: the spool.
    """

    def __init__(self, device: torch.device | None = None, spool: Spool | None = None) -> None:
        self.device = device if spool is None else torch.device("cpu")
        self.spool = spool
        self._shared: dict[tuple[object, ...], list[Tensor]] = {}

    def copy(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns a new contiguous copy.

        Raises:
            OSError: the disk is full.
        """
        return InMemory(self._copied(tensor)) if self.spool is None else self.spool.append(tensor)

    def columns(self, tensor: Tensor) -> Columns:
        """Return a copy of keys or values, to which more columns can be appended.

        Raises:
            OSError: the disk is full.
        """
        if self.spool is None:
            return MemoryColumns(self._copied(tensor))
        columns = SpooledColumns(self.spool)
        columns.append(0, tensor)
        return columns

    def copy_once(self, tensor: Tensor) -> Tensor:
        """Return a copy, the same one for all tensors with equal elements.

        Layers often share masks and biases.
        """
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        distinct = tensor.detach()[tuple(slice(0, n if stride else 1) for n, stride in strides)]
        device = self.device or tensor.device
        copies = self._shared.setdefault((tensor.shape, distinct.shape, tensor.dtype, device), [])
        distinct = distinct.to(device)
        for kept in copies:
            if torch.equal(kept[tuple(slice(0, n) for n in distinct.shape)], distinct):
                return kept
        own = distinct.clone(memory_format=torch.contiguous_format)
        copies.append(own.expand(tensor.shape))
        return copies[-1]

    def _copied(self, tensor: Tensor) -> Tensor:
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": self.device or tensor.device}
        copied = torch.empty(tuple(tensor.shape), **options)
        waits = "cpu" in (tensor.device.type, copied.device.type)
        return copied.copy_(tensor.detach(), non_blocking=not waits)
