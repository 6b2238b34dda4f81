"""Boxes of rows and columns, and the parts of tensors that they need."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Index = tuple[int | slice, ...]
Cut = Callable[[Tensor, Index], Tensor]
"""A function that returns tensor[index] for a block, maybe as a new leaf of autograd."""


class Box(NamedTuple):
    """A part of the matrix: slices with a start and a stop; ``rows`` alone may have a step."""

    leading: tuple[slice, ...]
    rows: slice
    columns: slice

    @property
    def at_rows(self) -> tuple[slice, ...]:
        """The index of the rows of the box in a tensor of shape (..., q_len)."""
        return (*self.leading, self.rows)

    @property
    def at_columns(self) -> tuple[slice, ...]:
        """The index of the columns of the box in a tensor of shape (..., kv_len)."""
        return (*self.leading, self.columns)

    @property
    def at_both(self) -> tuple[slice, ...]:
        """The index of the box in a tensor of shape (..., q_len, kv_len)."""
        return (*self.leading, self.rows, self.columns)

    def moved(self, count: int) -> "Box":
        """Return the box that lies this many rows further down."""
        return self._replace(rows=moved(self.rows, count))

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the box, (..., rows, columns)."""
        return tuple(length(part) for part in self.at_both)


def length(part: slice) -> int:
    """Return the number of positions in a slice with a start and a stop."""
    return len(range(part.start, part.stop, part.step or 1))


def as_slice(positions: range) -> slice:
    """Return a range that is not empty as a slice; its step is None if they are neighbours."""
    step = None if positions.step == 1 or len(positions) == 1 else positions.step
    return slice(positions[0], positions[-1] + 1, step)


def moved(part: slice, count: int) -> slice:
    """Return the slice that lies this many positions further on."""
    return slice(part.start + count, part.stop + count, part.step)


def positions(part: slice, device: torch.device) -> Tensor:
    """Return the positions in a slice with a start and a stop, as a tensor."""
    return torch.arange(part.start, part.stop, part.step or 1, device=device)


def broadcast_index(tensor: Tensor, index: Sequence[int | slice | Tensor]) -> Tensor:
    """Return tensor[index], where an axis of length 1 broadcasts to any index."""
    adapted: list[int | slice | Tensor] = []
    for axis, item in enumerate(index):
        if tensor.shape[axis] != 1:
            adapted.append(item)
        elif isinstance(item, Tensor):
            adapted.append(torch.zeros_like(item))
        else:
            adapted.append(0 if isinstance(item, int) else slice(None))
    return tensor[tuple(adapted)]


def cut_whole(tensor: Tensor, index: Index) -> Tensor:
    """Return tensor[index] without a new leaf of autograd: the default ``Cut``."""
    return broadcast_index(tensor, index)


def int_tensor(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return Python integers as a tensor on a device, without a synchronisation."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
