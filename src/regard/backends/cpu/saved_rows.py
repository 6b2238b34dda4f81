"""Numbers of rows that a forward pass leaves for the backward pass."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.reductions.needs import Needs
from regard.scores.box import Index


def unsaved_rows(shape: torch.Size, needs: Needs) -> tuple[Tensor, ...]:
    """Return memory for ``SavedRows``; a running number of NaN marks rows that no block saved."""
    others = len(needs.divergences)
    of_matrices = [(needs.k, len(needs.offsets)), *[(0, 0)] * others]
    return tuple(
        torch.full((*shape[:-1], width), fill, dtype=dtype, device="cpu")
        for k, offsets in of_matrices
        for width, fill, dtype in (
            (3, torch.nan, torch.float64),
            (2, 0, torch.float64),
            (k, 0, torch.int64),
            (offsets, 0, torch.float32),
        )
    ) + tuple(torch.zeros(shape[:-1], dtype=torch.float64, device="cpu") for _ in range(others))


class SavedRows:
    """Numbers of all rows of a matrix that the forward pass leaves for the backward pass.

    Args:
        tensors: running numbers, keys, largest scores and diagonals, each (..., q_len, n); the same
            of the other matrix of each divergence; and the divergences' totals, (..., q_len).

    Attributes:
        others: the numbers of each divergence.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrays = [tensor.numpy() for tensor in tensors[:4]]
        count = (len(tensors) - 4) // 5
        self.others = [
            SavedDivergence(SavedRows(tensors[4 * n : 4 * n + 4]), tensors[n - count - 1].numpy())
            for n in range(1, count + 1)
        ]

    def write(self, index: Index, *numbers: Any) -> None:
        """Save the running numbers of some rows, their keys, largest scores and diagonals."""
        for to, some in zip(self._arrays, numbers, strict=True):
            to[index] = some.reshape(to[index].shape)

    def read(self, index: Index) -> list[Any]:
        """Return the numbers of some rows, each (rows, n); NaN if no block has saved them."""
        some = [each[index] for each in self._arrays]
        return [each.reshape(prod(each.shape[:-1]), each.shape[-1]) for each in some]


class SavedDivergence(NamedTuple):
    """Numbers of a divergence that the forward pass leaves for the backward pass.

    Attributes:
        rows: those of the other matrix.
        totals: the sum of the terms of each row, (..., q_len).
    """

    rows: SavedRows
    totals: Any
