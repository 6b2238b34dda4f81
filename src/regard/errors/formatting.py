"""Text for messages: shapes, dtypes, kinds, counts and sizes."""

from collections.abc import Sequence

import torch


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text: ``(2, 8, 128, 64)``."""
    return str(tuple(shape))


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype without ``torch.``: ``float32``."""
    return str(dtype).removeprefix("torch.")


def kind_text(value: object) -> str:
    """Return the type of a value with its article: ``an int``, ``a list``, ``None``."""
    if value is None:
        return "None"
    return with_article(type(value).__name__)


def count_text(number: int, noun: str) -> str:
    """Return a number and its noun: ``1 head``, ``1,200 tokens``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def with_article(name: str) -> str:
    """Return a name after its article: ``an int64 tensor``, ``a float32 tensor``."""
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def bytes_text(count: int) -> str:
    """Return a number of bytes with three digits: ``8.62 KiB``."""
    size, units = float(count), ["TiB", "GiB", "MiB", "KiB", "bytes"]
    while size >= 999.5 and len(units) > 1:
        size /= 1024
        units.pop()
    return f"{size:.3g} {units[-1]}"
