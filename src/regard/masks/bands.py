"""Masks that allow a band along the diagonal: Causal and SlidingWindow."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.errors import check_whole
from regard.masks.key_bounds import KeyBounds
from regard.masks.mask import Mask, PointMask
from regard.scores.box import Box

__all__ = ["Band", "Causal", "SlidingWindow"]


@dataclass(frozen=True, repr=False)
class Band(Mask):
    """Keys from ``query + low`` to ``query + high``, after the shift that aligns the ends."""

    @abstractmethod
    def limits(self, shape: torch.Size) -> tuple[int | None, int]:
        """The lowest and the highest allowed kv_idx - q_idx; None is no limit."""

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return self

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return self

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        low, high = self.limits(shape)
        first, last = rows.start, rows.stop - 1

        def within(low_of: int, high_of: int) -> slice:
            start = 0 if low is None else min(max(low_of + low, 0), shape[-1])
            stop = min(max(high_of + high + 1, 0), shape[-1])
            return slice(start, max(start, stop))

        return KeyBounds(within(first, last), within(last, first))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        q_idx = torch.arange(box.rows.start, box.rows.stop, device=device)[:, None]
        kv_idx = torch.arange(box.columns.start, box.columns.stop, device=device)
        return self._within(q_idx, kv_idx, shape)

    def mask_mod(self, shape: torch.Size) -> PointMask:
        return lambda _b, _h, q_idx, kv_idx: self._within(q_idx, kv_idx, shape)

    def _within(self, q_idx: Tensor, kv_idx: Tensor, shape: torch.Size) -> Tensor:
        low, high = self.limits(shape)
        below = kv_idx <= q_idx + high
        return below if low is None else below & (kv_idx >= q_idx + low)


@dataclass(frozen=True, repr=False)
class Causal(Band):
    """A query attends to itself and what came before, never to what comes after.

    Args:
        align: where q_len and kv_len differ, ``"bottom-right"`` lines up the last query with the
            last key (the KV-cache meaning); ``"top-left"`` lines up the first ones, which is what
            ``is_causal=True`` means in PyTorch.

    Raises:
        ValueError: another alignment.

    Example:
        >>> import torch, regard
        >>> A = regard.attend(torch.zeros(2, 1), torch.zeros(3, 1), mask=regard.Causal())
        >>> A.to_dense()
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """

    align: Literal["bottom-right", "top-left"] = "bottom-right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom-right", "top-left"):
            raise ValueError(
                f"align is {self.align!r}; it must be 'bottom-right' or 'top-left'.\n"
                "    PyTorch's is_causal=True is 'top-left'; a KV cache needs 'bottom-right'."
            )

    def limits(self, shape: torch.Size) -> tuple[int | None, int]:
        return None, shape[-1] - shape[-2] if self.align == "bottom-right" else 0

    @property
    def text(self) -> str:
        return "Causal()" if self.align == "bottom-right" else f"Causal(align={self.align!r})"


@dataclass(frozen=True, repr=False)
class SlidingWindow(Band):
    """A query attends to the ``left`` keys before it, its own, and the ``right`` keys after it.

    The field has three meanings of "window"; here it is ``left + 1 + right`` keys, the query's
    own included. Mistral's ``sliding_window=w`` is ``SlidingWindow(w - 1, 0)``.

    Args:
        left: how many keys before the query's own.
        right: how many keys after it.

    Raises:
        TypeError: not whole numbers.
        ValueError: a negative number.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.SlidingWindow(1, 0)).to_dense()
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.0000, 0.5000, 0.5000]])
    """

    left: int
    right: int

    def __post_init__(self) -> None:
        if check_whole("left", self.left) < 0 or check_whole("right", self.right) < 0:
            raise ValueError(
                f"SlidingWindow has left={self.left} and right={self.right}; "
                "both count keys and must be at least 0.\n"
                "    The query's own key is always included."
            )

    def limits(self, shape: torch.Size) -> tuple[int | None, int]:
        shift = shape[-1] - shape[-2]
        return shift - self.left, shift + self.right

    @property
    def text(self) -> str:
        return f"SlidingWindow({self.left}, {self.right})"
