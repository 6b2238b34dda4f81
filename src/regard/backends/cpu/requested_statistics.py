"""The statistics that reductions read from a block, and what a backward pass needs of them."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.reductions.divergences import Divergence
from regard.reductions.products import Output, TransposedOutput, Window
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import MaxScore, NormalizedEntropy
from regard.reductions.sums import Diagonal, Sum, SumsOfRows
from regard.reductions.top_k import TopK
from regard.scores.box import Index


class RequestedStatistics(NamedTuple):
    """The statistics that some reductions read from a block.

    Attributes:
        k: the number of largest weights of each row.
        sums: the reductions that sum weights over rows.
        values: the value of each ``Output``.
        operands: the operand of each ``TransposedOutput``.
        windows: the columns of each ``Window``.
        offsets: the offset of each ``Diagonal``.
        divergences: the divergences from other matrices.
        keys: whether the visible keys of each row are counted.
        largest_score: whether the largest score of each row is read.
    """

    k: int
    sums: tuple[SumsOfRows, ...]
    values: tuple[Tensor, ...]
    operands: tuple[Tensor, ...]
    windows: tuple[range, ...]
    offsets: tuple[int, ...]
    divergences: tuple[Divergence, ...]
    keys: bool
    largest_score: bool

    @property
    def weights(self) -> bool:
        """True if the weights of complete rows are read."""
        return bool(self.sums or self.operands or self.windows)

    @property
    def has_gradients(self) -> bool:
        """True if a compiled kernel gives all gradients."""
        products = self.values or self.operands or self.windows
        return not products and not self.largest_score

    @classmethod
    def by(cls, reductions: Sequence[Reduction]) -> "RequestedStatistics":
        """Return what these reductions read."""
        of_rows = (each for each in reductions if isinstance(each, SumsOfRows))
        return cls(
            max((each.k for each in reductions if isinstance(each, TopK)), default=0),
            tuple(each for each in of_rows if each != Sum(-1)),  # a sum over columns
            tuple(each.value for each in reductions if isinstance(each, Output)),
            tuple(each.operand for each in reductions if isinstance(each, TransposedOutput)),
            tuple(each.at_columns for each in reductions if isinstance(each, Window)),
            tuple({each.offset for each in reductions if isinstance(each, Diagonal)}),
            tuple(each for each in reductions if isinstance(each, Divergence)),
            any(isinstance(each, NormalizedEntropy) for each in reductions),
            any(isinstance(each, MaxScore) for each in reductions),
        )


def unsaved_rows(shape: torch.Size, requested: RequestedStatistics) -> tuple[Tensor, ...]:
    """Return memory for ``SavedRows``; a running number of NaN marks rows that no block saved."""
    others = len(requested.divergences)
    of_matrices = [(requested.k, len(requested.offsets)), *[(0, 0)] * others]
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
