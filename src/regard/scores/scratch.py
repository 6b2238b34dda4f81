"""Scratch memory that consecutive blocks reuse."""

from math import prod

import torch
from torch import Tensor


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
            tensor = torch.empty(max(self.capacity, prod(size)), dtype=dtype, device=device)
            self._tensors[name] = tensor
        return tensor[: prod(size)].view(size)
