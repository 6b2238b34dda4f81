"""Parsing of the index in ``A[...]``."""

from operator import index as whole_number
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.errors import check_index_bounds
from regard.scores.box import Index


class ParsedIndex(NamedTuple):
    """The parsed index of a part of a matrix.

    Attributes:
        leading: one integer or slice for each leading axis.
        rows: the queries.
        columns: the keys.
        whole: True if rows and columns were omitted or written ``:``. In this case the part of an
            attention matrix is again an attention matrix. Any other index of rows or columns, even
            ``0:n``, gives a tensor.
    """

    leading: Index
    rows: int | range
    columns: int | range
    whole: bool

    @property
    def ranges(self) -> tuple[range, range]:
        """The rows and the columns, an integer as a range of length 1."""
        return _as_range(self.rows), _as_range(self.columns)

    def drop_axes(self, part: Tensor) -> Tensor:
        """Remove the axes of (..., rows, columns) that have an integer index."""
        part = part.squeeze(-2) if isinstance(self.rows, int) else part
        return part.squeeze(-1) if isinstance(self.columns, int) else part


def parse_index(key: Any, shape: torch.Size) -> ParsedIndex:
    """Parse ``A[key]`` into leading axes, rows and columns.

    Args:
        key: integers (Python, NumPy, or integer tensors without axes), slices, and at most one
            ``...``.
        shape: the shape of the matrix, (..., q_len, kv_len).

    Raises:
        TypeError: if an index is neither an integer, a slice nor ``...``.
        IndexError: if there are too many indices, or one is out of range.
        ValueError: if a slice has a negative step, or a slice of a leading axis is empty.
    """
    items = list(cast(tuple[Any, ...], key)) if isinstance(key, tuple) else [key]
    items = [item if item is ... else _as_index(item) for item in items]
    dots = [i for i, item in enumerate(items) if item is ...]
    given = len(items) - len(dots)
    if len(dots) > 1 or given > len(shape):
        raise IndexError(
            f"the index has {given} entries and {len(dots)} '...'; a matrix of shape "
            f"{tuple(shape)} takes at most {len(shape)} and one '...'."
        )
    at = dots[0] if dots else len(items)
    missing: list[Any] = [slice(None)] * (len(shape) - given)
    items = [*items[:at], *missing, *items[at + 1 :]]
    resolved = [
        _resolve(item, n, axis) for axis, (item, n) in enumerate(zip(items, shape, strict=True))
    ]
    leading = tuple(_leading_index(item, axis) for axis, item in enumerate(resolved[:-2]))
    return ParsedIndex(leading, resolved[-2], resolved[-1], items[-2:] == [slice(None)] * 2)


def _as_range(index: int | range) -> range:
    return range(index, index + 1) if isinstance(index, int) else index


def _as_index(item: Any) -> int | slice:
    """Return a slice unchanged, and any integer-like index as an int."""
    if isinstance(item, slice):
        return cast(slice, item)
    one = not isinstance(item, bool | Tensor) or (
        isinstance(item, Tensor) and item.ndim == 0 and item.dtype != torch.bool
    )
    try:
        if one:
            return whole_number(item)
    except TypeError:
        pass
    raise TypeError(
        f"an attention matrix has no index of type {type(item).__name__}; "
        "it takes integers, slices and one '...'.\n"
        "    For chosen rows take A[..., start:stop, :] and index that tensor."
    )


def _leading_index(item: int | range, axis: int) -> int | slice:
    """Return the index of a leading axis, which must not be empty."""
    if isinstance(item, int):
        return item
    if not item:
        raise ValueError(
            f"the slice on axis {axis} is empty; it must keep at least one matrix.\n"
            "    Only the slices of rows and columns, the last two axes, may be empty."
        )
    return slice(item.start, item.stop, item.step)


def _resolve(item: int | slice, length: int, axis: int) -> int | range:
    if isinstance(item, int):
        return check_index_bounds(item, length, axis)
    if item.step is not None and item.step < 1:
        raise ValueError(
            f"the slice on axis {axis} has step {item.step}; steps must be at least 1, as in "
            "PyTorch.\n    Take the part and use .flip() on it."
        )
    return range(length)[item]
