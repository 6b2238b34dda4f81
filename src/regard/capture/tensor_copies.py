"""Copies of a model's tensors: on the same device, on another one, or in mapped files."""

import mmap
from collections.abc import Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

__all__ = ["TensorCopies"]

_AT_ONCE = bytes(2**20)


class TensorCopies:
    """A maker of copies of tensors that share no memory with the originals.

    A copy from or to the CPU is synchronous, because the CPU may use both tensors at once. A copy
    between other devices is asynchronous, because later work on these devices runs after it.

    Args:
        device: the device of the copies; None keeps each copy on the device of its original.
        folder: the folder of the temporary files that copies are mapped from; None keeps copies in
            memory. The files are unlinked, so that none remains after a crash.
    """

    def __init__(self, device: torch.device | None = None, folder: Path | None = None) -> None:
        self._device = device
        self._folder = folder
        self._shared: dict[tuple[object, ...], list[Tensor]] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a new contiguous copy."""
        copied = self.empty(tensor.shape, tensor)
        waits = "cpu" in (tensor.device.type, copied.device.type)
        return copied.copy_(tensor.detach(), non_blocking=not waits)

    def copy_once(self, tensor: Tensor) -> Tensor:
        """Return a copy, the same one for all tensors with equal elements.

        Layers often share masks and biases.
        """
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        distinct = tensor.detach()[tuple(slice(0, n if stride else 1) for n, stride in strides)]
        device = self._device or tensor.device
        known = self._shared.setdefault((tensor.shape, distinct.shape, tensor.dtype, device), [])
        distinct = distinct.to(device)
        for kept in known:
            if torch.equal(kept[tuple(slice(0, n) for n in distinct.shape)], distinct):
                return kept
        own = distinct.clone(memory_format=torch.contiguous_format)
        known.append(own.expand(tensor.shape))
        return known[-1]

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialised tensor of this shape, with the dtype of ``like``.

        Raises:
            OSError: the disk is full.
        """
        if self._folder is not None:
            return self._mapped(shape, like.dtype)
        return torch.empty(tuple(shape), dtype=like.dtype, device=self._device or like.device)

    def _mapped(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose memory is mapped from a file.

        The operating system can write it to the disk if memory runs short.
        """
        count = prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        size = count * dtype.itemsize
        with TemporaryFile(dir=self._folder) as file:
            # The whole file is written first: a write to a mapped page for which the disk has no
            # room would kill the process.
            for start in range(0, size, len(_AT_ONCE)):
                file.write(_AT_ONCE[: size - start])
            file.flush()
            content = mmap.mmap(file.fileno(), size)
        return torch.frombuffer(content, dtype=dtype, count=count).view(tuple(shape))
