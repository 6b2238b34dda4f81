"""Parsing of the index in ``A[...]``."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import index as whole_number
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from regard.errors import check_index_bounds
from regard.scores.box import int_tensor

LeadingIndex: TypeAlias = "tuple[int | slice | list[int] | None, ...]"
"""An index for each leading axis; None inserts an axis of length 1, a list chooses positions."""

_ONE_LIST = (
    "    Index one axis at a time, A[:, [0, 2]][..., [1, 3], :], or take a range and index that "
    "tensor."
)


class ParsedIndex(NamedTuple):
    """The parsed index of a part of a matrix.

    Attributes:
        leading: an index for each leading axis, and None for each new one.
        rows: the queries.
        columns: the keys.
        whole: True if rows and columns were omitted or written ``:``. In this case the part of an
            attention matrix is again an attention matrix. Any other index of rows or columns, even
            ``0:n``, gives a tensor.
    """

    leading: LeadingIndex
    rows: int | range | list[int]
    columns: int | range | list[int]
    whole: bool

    @property
    def tile(self) -> tuple[range | list[int], range | list[int]]:
        """The rows and the columns, an integer as a range of length 1."""
        return _as_range(self.rows), _as_range(self.columns)

    def drop_axes(self, part: Tensor) -> Tensor:
        """Remove the axes of (..., rows, columns) that have an integer index."""
        part = part.squeeze(-2) if isinstance(self.rows, int) else part
        return part.squeeze(-1) if isinstance(self.columns, int) else part


def parse_index(key: Any, shape: torch.Size) -> ParsedIndex:
    """Parse ``A[key]`` into leading axes, rows and columns.

    Args:
        key: integers (Python, NumPy, or integer tensors without axes), slices, None before the
            rows, at most one ``...``, and at most one list, array or tensor of one axis, of whole
            numbers or bools.
        shape: the shape of the matrix, (..., q_len, kv_len).

    Raises:
        TypeError: if an index is of another kind.
        IndexError: if there are too many indices, or one is out of range.
        ValueError: if a slice has a negative step, a slice of a leading axis is empty, or there
            are several lists.
    """
    items = list(cast(tuple[Any, ...], key)) if isinstance(key, tuple) else [key]
    items = [item if item is ... or item is None else _as_index(item) for item in items]
    dots = [i for i, item in enumerate(items) if item is ...]
    given = sum(item is not None for item in items) - len(dots)
    if len(dots) > 1 or given > len(shape):
        raise IndexError(
            f"the index has {given} entries and {len(dots)} '...'; a matrix of shape "
            f"{tuple(shape)} takes at most {len(shape)} and one '...'."
        )
    at = dots[0] if dots else len(items)
    missing: list[Any] = [slice(None)] * (len(shape) - given)
    items = [*items[:at], *missing, *items[at + 1 :]]
    if sum(isinstance(item, list) for item in items) > 1:
        raise ValueError(f"the index has several lists; it takes one.\n{_ONE_LIST}")
    if None in items[-2:]:
        raise ValueError(
            "the index has None after the rows; queries and keys stay the last two axes.\n"
            "    Take the part first, A[..., 0, :], and use .unsqueeze(-1) on it."
        )
    new_axes, items = items, [item for item in items if item is not None]
    resolved = [
        _resolve(item, n, axis) for axis, (item, n) in enumerate(zip(items, shape, strict=True))
    ]
    entries = iter(_leading_index(item, axis) for axis, item in enumerate(resolved[:-2]))
    leading = tuple(None if item is None else next(entries) for item in new_axes[:-2])
    return ParsedIndex(leading, resolved[-2], resolved[-1], items[-2:] == [slice(None)] * 2)


def read_tile(
    rows: range | list[int],
    columns: range | list[int],
    read: Callable[[range, range], Tensor],
) -> Tensor:
    """Return (..., rows, columns) of a matrix that is read in ranges.

    A list of rows or columns is covered by a few short ranges.
    """
    if isinstance(rows, list):
        return _read_spans(rows, -2, lambda span: read_tile(span, columns, read))
    if isinstance(columns, list):
        return _read_spans(columns, -1, lambda span: read(rows, span))
    return read(rows, columns)


def select_leading(tensor: Tensor, index: LeadingIndex, lengths: Sequence[int]) -> Tensor:
    """Return the part of a tensor whose leading axes have these lengths, or length 1.

    An axis of length 1 broadcasts to any index.
    """
    return tensor[fit_index(index, tensor.shape, lengths)]


def fit_index(index: LeadingIndex, shape: Sequence[int], lengths: Sequence[int]) -> LeadingIndex:
    """Return the index for leading axes of which some have length 1 instead of these lengths."""
    fitted: list[int | slice | list[int] | None] = []
    axes = iter(zip(shape, lengths, strict=False))
    for item in index:
        if item is not None:
            size, length = next(axes)
            if size == 1 and length > 1:
                item = 0 if isinstance(item, int) else slice(0, 1, 1)
        fitted.append(item)
    return tuple(fitted)


def _read_spans(positions: list[int], dim: int, read: Callable[[range], Tensor]) -> Tensor:
    """Return the numbers at some positions of one axis, read in ranges that cover them."""
    order = sorted(set(positions))
    # A range may hold about twice as many positions as were chosen.
    cuts = [0]
    for at, (before, after) in enumerate(pairwise(order), 1):
        if after - before > 16 and after - order[cuts[-1]] > 2 * (at - cuts[-1]) + 16:
            cuts.append(at)
    parts: list[Tensor] = []
    for first, stop in pairwise([*cuts, len(order)]):
        part = read(range(order[first], order[stop - 1] + 1))
        at = [position - order[first] for position in order[first:stop]]
        parts.append(part.index_select(dim, int_tensor(at, part.device)))
    rank = {position: at for at, position in enumerate(order)}
    numbers = torch.cat(parts, dim)
    return numbers.index_select(dim, int_tensor([rank[each] for each in positions], numbers.device))


def _as_range(index: int | range | list[int]) -> range | list[int]:
    return range(index, index + 1) if isinstance(index, int) else index


def _as_index(item: Any) -> int | slice | list[Any]:
    """Return an integer-like index as an int, and several as a list of ints or bools."""
    if isinstance(item, slice):
        return cast(slice, item)
    several = _as_list(item)
    if several is not None:
        return several
    one = not isinstance(item, bool | list | tuple | range)
    if isinstance(item, Tensor):
        one = item.ndim == 0 and item.dtype != torch.bool
    try:
        if one:
            return whole_number(cast(Any, item))
    except TypeError:
        pass
    raise TypeError(
        f"an attention matrix has no index of type {_kind(item)}; it takes integers, slices, one "
        "list of integers or bools, None and one '...'.\n"
        "    For a mask of single weights multiply rows and columns, (A * rows[:, None]) * "
        "columns, or use to_dense()."
    )


def _as_list(item: Any) -> list[Any] | None:
    """Return the ints or bools of a list, array or tensor of one axis; None for anything else."""
    if isinstance(item, list | tuple | range):
        several = list(cast(Sequence[Any], item))
    elif getattr(item, "ndim", 0) == 1 and hasattr(item, "tolist"):
        several = cast(list[Any], item.tolist())
    else:
        return None
    kinds = set(map(type, several))
    return several if len(kinds) < 2 and kinds <= {int, bool} else None


def _kind(item: Any) -> str:
    axes = getattr(item, "ndim", 0)
    return type(item).__name__ + (f" of {axes} axes" if axes > 1 else "")


def _leading_index(item: int | range | list[int], axis: int) -> int | slice | list[int]:
    """Return the index of a leading axis, which must not be empty."""
    if isinstance(item, int):
        return item
    if not item:
        raise ValueError(
            f"the slice on axis {axis} is empty; it must keep at least one matrix.\n"
            "    Only the slices of rows and columns, the last two axes, may be empty."
        )
    return item if isinstance(item, list) else slice(item.start, item.stop, item.step)


def _resolve(item: int | slice | list[Any], length: int, axis: int) -> int | range | list[int]:
    if isinstance(item, int):
        return check_index_bounds(item, length, axis)
    if isinstance(item, list):
        if not item:
            return range(0)
        if not isinstance(item[0], bool):
            return [check_index_bounds(each, length, axis) for each in item]
        if len(item) != length:
            raise IndexError(
                f"the bools on axis {axis} are {len(item)}; the axis has length {length}.\n"
                f"    Pass {length} bools, or the positions."
            )
        return [place for place, chosen in enumerate(item) if chosen] or range(0)
    if item.step is not None and item.step < 1:
        raise ValueError(
            f"the slice on axis {axis} has step {item.step}; steps must be at least 1, as in "
            "PyTorch.\n    Take the part and use .flip() on it."
        )
    return range(length)[item]
