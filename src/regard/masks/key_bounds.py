"""The keys that some rows can attend to, and the arithmetic of such ranges of keys."""

from typing import NamedTuple

__all__ = ["NO_KEYS", "KeyBounds", "around", "hull", "length", "overlap"]

NO_KEYS = slice(0, 0)


class KeyBounds(NamedTuple):
    """What a mask knows of some rows without a look at every key, so that work is skipped.

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


def length(keys: slice) -> int:
    """Return the number of keys in a range."""
    return keys.stop - keys.start


def overlap(first: slice, second: slice) -> slice:
    """Return the keys that lie in both ranges."""
    start, stop = max(first.start, second.start), min(first.stop, second.stop)
    return slice(start, max(start, stop))


def hull(first: slice, second: slice) -> slice:
    """Return the smallest range around two ranges, each of which may be empty."""
    if not length(first):
        return second
    if not length(second):
        return first
    return slice(min(first.start, second.start), max(first.stop, second.stop))


def around(keys: slice, total: int) -> tuple[slice, slice]:
    """Return the keys before a range and those after it; all keys lie before an empty range."""
    if not length(keys):
        return slice(0, total), NO_KEYS
    return slice(0, keys.start), slice(keys.stop, total)
