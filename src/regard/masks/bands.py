"""Masks that allow a band along the diagonal: Causal and SlidingWindow."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from regard.errors import check_whole
from regard.masks.mask import KeyBounds, Mask, Points, PositionLimits


@dataclass(frozen=True, repr=False)
class Band(Mask):
    """A mask that allows the keys from ``q_idx + low`` to ``q_idx + high``."""

    @abstractmethod
    def band(self, shape: torch.Size) -> tuple[int | None, int]:
        """Return low and high, the limits of kv_idx - q_idx; None is no limit."""

    def limits(self, shape: torch.Size) -> PositionLimits:
        return PositionLimits(*self.band(shape))

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return self

    def allows(self, points: Points) -> Tensor:
        low, high = self.band(points.shape)
        q_idx, kv_idx = points.q_idx, points.kv_idx
        below = kv_idx <= q_idx + high
        return below if low is None else below & (kv_idx >= q_idx + low)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        low, high = self.band(shape)
        first, last = rows.start, rows.stop - 1

        def keys(low_of: int, high_of: int) -> slice:
            start = 0 if low is None else min(max(low_of + low, 0), shape[-1])
            stop = min(max(high_of + high + 1, 0), shape[-1])
            return slice(start, max(start, stop))

        return KeyBounds(keys(first, last), keys(last, first))


@final
@dataclass(frozen=True, repr=False)
class Causal(Band):
    """A mask that lets a query attend to its own key and the keys before it.

    Args:
        align: if q_len and kv_len differ, ``"bottom-right"`` aligns the last query with the last
            key, as with a KV cache; ``"top-left"`` aligns the first query with the first key, as
            ``is_causal=True`` does in PyTorch.

    Raises:
        ValueError: align is something else.

    Example:
        >>> import torch, regard
        >>> A = regard.attend(torch.zeros(2, 1), torch.zeros(3, 1), mask=regard.Causal())
        >>> A.to_dense()
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """

    thread_safe = True

    align: Literal["bottom-right", "top-left"] = "bottom-right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom-right", "top-left"):
            raise ValueError(
                f"align is {self.align!r}; it must be 'bottom-right' or 'top-left'.\n"
                "    PyTorch's is_causal=True is 'top-left'; a KV cache needs 'bottom-right'."
            )

    def band(self, shape: torch.Size) -> tuple[int | None, int]:
        return None, shape[-1] - shape[-2] if self.align == "bottom-right" else 0

    def rows(self, rows: range, q_len: int) -> Mask:
        ends = (rows.start, 0) if self.align == "top-left" else (rows.stop, q_len)
        return self if ends[0] == ends[1] else super().rows(rows, q_len)

    @property
    def text(self) -> str:
        return "Causal()" if self.align == "bottom-right" else f"Causal(align={self.align!r})"


@final
@dataclass(frozen=True, repr=False)
class SlidingWindow(Band):
    """A mask that allows ``left`` keys before a query, its own key, and ``right`` keys after it.

    The window has ``left + 1 + right`` keys, including the query's own key; other libraries count
    it differently. Mistral's ``sliding_window=w`` is ``SlidingWindow(w - 1, 0)``. If q_len and
    kv_len differ, the last query is aligned with the last key.

    Args:
        left: the number of keys before the query's own key.
        right: the number of keys after the query's own key.

    Raises:
        TypeError: left or right is not a whole number.
        ValueError: left or right is negative.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.SlidingWindow(1, 0)).to_dense()
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.0000, 0.5000, 0.5000]])
    """

    thread_safe = True

    left: int
    right: int

    def __post_init__(self) -> None:
        if check_whole("left", self.left) < 0 or check_whole("right", self.right) < 0:
            raise ValueError(
                f"SlidingWindow has left={self.left} and right={self.right}; "
                "both count keys and must be at least 0.\n"
                "    The query's own key is always included."
            )

    def band(self, shape: torch.Size) -> tuple[int | None, int]:
        shift = shape[-1] - shape[-2]
        return shift - self.left, shift + self.right

    def rows(self, rows: range, q_len: int) -> Mask:
        return self if rows.stop == q_len else super().rows(rows, q_len)

    @property
    def text(self) -> str:
        return f"SlidingWindow({self.left}, {self.right})"
