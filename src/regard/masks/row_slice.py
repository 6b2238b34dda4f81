"""The mask of some rows of a larger matrix: RowSlice."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from regard.errors import check_count, check_whole, shape_text
from regard.masks.mask import KeyBounds, Mask, Points, PositionLimits
from regard.scores.box import moved


@final
@dataclass(frozen=True, eq=False, repr=False)
class RowSlice(Mask):
    """The rows of a mask from query ``start`` on, for a matrix of some of ``q_len`` queries.

    The position of a query depends on the first or the last query of the whole matrix. RowSlice
    keeps the positions if a matrix has only some of the queries of a model.

    Args:
        mask: the mask of the whole matrix.
        start: the first query of the part.
        q_len: the number of queries of the whole matrix.

    Raises:
        TypeError: start or q_len is not a whole number.
        ValueError: start is negative, or q_len is below 1. ``attend`` raises this error if the
            matrix needs more rows than the mask has after ``start``.

    Example:
        >>> import regard
        >>> regard.masks.RowSlice(regard.Causal(), 1, 4).to_dense(2, 4)
        tensor([[ True,  True, False, False],
                [ True,  True,  True, False]])
    """

    thread_safe = True

    mask: Mask
    start: int
    q_len: int

    def __post_init__(self) -> None:
        check_count("q_len", self.q_len)
        if check_whole("start", self.start) < 0:
            raise ValueError(
                f"start is {self.start}; it must be at least 0.\n"
                "    Count from the first query of the whole matrix."
            )

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        if self.start + shape[-2] > self.q_len:
            raise ValueError(
                f"mask has rows {self.start} to {self.q_len - 1}; a matrix of shape "
                f"{shape_text(shape)} has {shape[-2]} queries.\n"
                "    Give as many queries as rows, or fewer."
            )
        return RowSlice(self.mask.bind(self._whole(shape), device), self.start, self.q_len)

    def allows(self, points: Points) -> Tensor:
        *leading, rows, columns = points.places
        rows = moved(rows, self.start) if isinstance(rows, slice) else rows + self.start
        whole = self._whole(points.shape)
        return self.mask.allows(Points((*leading, rows, columns), whole, points.device))

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        return self.mask.key_bounds(leading, moved(rows, self.start), self._whole(shape))

    def limits(self, shape: torch.Size) -> PositionLimits | None:
        limits = self.mask.limits(self._whole(shape))
        if limits is None:
            return None
        low = None if limits.low is None else limits.low + self.start
        high = None if limits.high is None else limits.high + self.start
        return limits._replace(low=low, high=high, start=limits.start + self.start)

    def rows(self, rows: range, q_len: int) -> Mask:
        whole = range(self.start + rows.start, self.start + rows.stop)
        return self.mask.rows(whole, self.q_len)

    @property
    def text(self) -> str:
        return f"RowSlice({self.mask.text}, {self.start}, {self.q_len})"

    def _whole(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[:-2], self.q_len, shape[-1]))
