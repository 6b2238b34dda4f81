"""Copies of a model's tensors: beside them, on another device, or in files on a disk."""

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
    """Keeps copies of tensors, which nothing that happens to the originals can reach.

    A copy to the CPU is waited for, because somebody may read it at once; to another device it is
    not, because whoever reads it there comes after it.

    Args:
        device: where to keep them; None: where each of them is.
        folder: for files that large copies are mapped from; None: in memory. The files have no
            name, so that nothing is left of them whatever happens.

    Example:
        >>> import torch
        >>> from regard.capture.tensor_copies import TensorCopies
        >>> TensorCopies().copy(torch.arange(3))
        tensor([0, 1, 2])
    """

    def __init__(self, device: torch.device | None = None, folder: Path | None = None) -> None:
        self._device = device
        self._folder = folder
        self._shared: dict[tuple[object, ...], list[Tensor]] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of its own, contiguous."""
        copied = self.empty(tensor.shape, tensor)
        waits = "cpu" in (tensor.device.type, copied.device.type)
        return copied.copy_(tensor.detach(), non_blocking=not waits)

    def copy_once(self, tensor: Tensor) -> Tensor:
        """Return one copy for all tensors with the same content, as masks and biases have."""
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
        """Return room for a tensor of this shape, of the dtype of another, not yet written.

        Raises:
            OSError: the disk is full.
        """
        if self._folder is not None:
            return self._mapped(shape, like.dtype)
        return torch.empty(tuple(shape), dtype=like.dtype, device=self._device or like.device)

    def _mapped(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose memory is a file; the system writes it out when memory is short."""
        count = prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        size = count * dtype.itemsize
        with TemporaryFile(dir=self._folder) as file:
            # All of it is written first: a map of a file that the disk has no room for would end
            # the process.
            for start in range(0, size, len(_AT_ONCE)):
                file.write(_AT_ONCE[: size - start])
            file.flush()
            content = mmap.mmap(file.fileno(), size)
        return torch.frombuffer(content, dtype=dtype, count=count).view(tuple(shape))
