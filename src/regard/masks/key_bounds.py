"""Columns: what a mask knows of some rows, and the arithmetic of such parts of the keys."""

from typing import NamedTuple

__all__ = ["KeyBounds", "around", "hull", "length", "overlap"]


class KeyBounds(NamedTuple):
    """What a mask knows of some rows without looking at every key, so that work is skipped.

    Attributes:
        any: outside these keys none of the rows attends to anything; may be empty.
        all: to these keys all of the rows may attend, so nothing is masked there; a part of
            ``any``, may be empty.

    Example:
        >>> import torch, regard
        >>> regard.Causal().key_bounds((), slice(2, 4), torch.Size((5, 5)))
        KeyBounds(any=slice(0, 4, None), all=slice(0, 3, None))
    """

    any: slice
    all: slice


def length(part: slice) -> int:
    """How many keys a part holds."""
    return part.stop - part.start


def overlap(first: slice, second: slice) -> slice:
    """What lies in both parts."""
    start, stop = max(first.start, second.start), min(first.stop, second.stop)
    return slice(start, max(start, stop))


def hull(first: slice, second: slice) -> slice:
    """From the first to the last of two parts, of which each may be empty."""
    if not length(first):
        return second
    if not length(second):
        return first
    return slice(min(first.start, second.start), max(first.stop, second.stop))


def around(part: slice, total: int) -> tuple[slice, slice]:
    """What lies before a part, and what lies after it; before an empty part lies everything."""
    if not length(part):
        return slice(0, total), slice(0, 0)
    return slice(0, part.start), slice(part.stop, total)
