"""The exception of regard, and the words in which an error says what came."""

from collections.abc import Sequence

import torch

__all__ = [
    "RegardError",
    "bytes_text",
    "count_text",
    "dtype_text",
    "kind_text",
    "readable",
    "shape_text",
    "with_article",
]


class RegardError(Exception):
    """What went wrong is regard's own: a model without attention, a recording that is damaged.

    Wrong arguments raise the usual ValueError, TypeError or MemoryError instead.

    Example:
        >>> import regard
        >>> issubclass(regard.RegardError, Exception)
        True
    """


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it: ``(2, 8, 128, 64)``."""
    return str(tuple(shape))


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype without the name of the library: ``float32``."""
    return str(dtype).removeprefix("torch.")


def kind_text(value: object) -> str:
    """What kind of thing a value is, with its article: ``an int``, ``a list``, ``None``."""
    if value is None:
        return "None"
    return with_article(type(value).__name__)


def count_text(number: int, noun: str) -> str:
    """A number and its noun: ``1 head``, ``1,200 tokens``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def with_article(name: str) -> str:
    """A name after its article: ``an int64 tensor``, ``a float32 tensor``."""
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def bytes_text(count: int) -> str:
    """A number of bytes as people write it: ``8.62 KiB``."""
    return readable(count, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))


def readable(count: float, step: int, units: tuple[str, ...]) -> str:
    """Three digits and the unit that fits."""
    place = 0
    while count >= 999.5 and place + 1 < len(units):
        count, place = count / step, place + 1
    return f"{count:.3g} {units[place]}"
