"""Declarations of what reductions read of a block, so that a backend computes that and no more."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from regard.reductions.divergences import Divergence
    from regard.reductions.sums import SumsOfRows


class Needs(NamedTuple):
    """The parts of a block that reductions read, besides the numbers of ``RowStatistics``.

    Attributes:
        block: whether scores or weights are read that no other field names.
        k: the number of largest weights of each row.
        sums: the reductions that sum weights over rows.
        values: the value of each product with the weights.
        operands: the operand of each product with the transposed weights.
        tiles: the columns of each tile.
        offsets: the offset of each diagonal.
        divergences: the divergences from other matrices.
        keys: whether the visible keys of each row are counted.
        largest_score: whether the largest score of each row is read with its gradients.
        mean_shifted: whether the mean of the shifted scores is read, which entropies need.

    Example:
        >>> import regard
        >>> regard.TopK(8).needs.k
        8
    """

    block: bool = False
    k: int = 0
    sums: "tuple[SumsOfRows, ...]" = ()
    values: tuple[Tensor, ...] = ()
    operands: tuple[Tensor, ...] = ()
    tiles: tuple[range, ...] = ()
    offsets: tuple[int, ...] = ()
    divergences: "tuple[Divergence, ...]" = ()
    keys: bool = False
    largest_score: bool = False
    mean_shifted: bool = False

    @property
    def weights(self) -> bool:
        """True if the weights of complete rows are read."""
        return bool(self.sums or self.operands or self.tiles)

    @property
    def sorted_offsets(self) -> list[int]:
        """The offsets of the diagonals, in rising order."""
        return sorted(self.offsets)

    @property
    def columns(self) -> list[int]:
        """The columns of all tiles, in rising order."""
        return sorted({column for tile in self.tiles for column in tile})

    @property
    def products(self) -> bool:
        """True if products of the weights, or tiles of them, are read."""
        return bool(self.values or self.operands or self.tiles)


def joined(needs: Iterable[Needs]) -> Needs:
    """Return the needs of several reductions together."""
    several = list(needs)
    return Needs(
        any(each.block for each in several),
        max((each.k for each in several), default=0),
        tuple(item for each in several for item in each.sums),
        tuple(item for each in several for item in each.values),
        tuple(item for each in several for item in each.operands),
        tuple(item for each in several for item in each.tiles),
        tuple({item for each in several for item in each.offsets}),
        tuple(item for each in several for item in each.divergences),
        any(each.keys for each in several),
        any(each.largest_score for each in several),
        any(each.mean_shifted for each in several),
    )
