"""Masks that are bool tensors: Keep, where True means *may attend*, and Drop, its opposite."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import check_broadcast, shape_text
from regard.masks.key_bounds import KeyBounds
from regard.masks.mask import Mask, PointMask, no_mask, pick
from regard.scores.box import Box, broadcast_index

__all__ = ["Drop", "Keep"]


@dataclass(frozen=True, eq=False, repr=False)
class Keep(Mask):
    """A bool tensor in which True means *may attend*, as in ``scaled_dot_product_attention``.

    Args:
        mask: bool, broadcastable to (..., num_heads, q_len, kv_len). For padding of shape
            (batch, kv_len) pass ``mask[:, None, None, :]``; as it is, with batch = q_len, it would
            be taken for (q_len, kv_len).

    Raises:
        TypeError: not a bool tensor.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Keep(torch.tensor([True, False, True])))[0]
        tensor([0.5000, 0.0000, 0.5000])
    """

    mask: Tensor

    def __post_init__(self) -> None:
        _check_bool(self.mask)

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Keep(check_broadcast("mask", self.mask, shape, device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return Keep(function(self.mask))

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        return KeyBounds(slice(0, shape[-1]), slice(0, 0))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return broadcast_index(self.mask, box.at_both)

    def mask_mod(self, shape: torch.Size) -> PointMask:
        return lambda b, h, q_idx, kv_idx: pick(self.mask, b, h, q_idx, kv_idx)

    @property
    def text(self) -> str:
        return f"Keep({shape_text(self.mask.shape)})"


@dataclass(frozen=True, eq=False, repr=False)
class Drop(Mask):
    """A bool tensor in which True means *may not attend*, as in ``nn.MultiheadAttention``.

    Args:
        mask: bool, broadcastable to (..., num_heads, q_len, kv_len).

    Raises:
        TypeError: not a bool tensor.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Drop(torch.tensor([False, True, False])))[0]
        tensor([0.5000, 0.0000, 0.5000])
    """

    mask: Tensor

    def __post_init__(self) -> None:
        _check_bool(self.mask)

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Keep(~self.mask).bind(shape, device)

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return Drop(function(self.mask))

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        return KeyBounds(slice(0, shape[-1]), slice(0, 0))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return ~broadcast_index(self.mask, box.at_both)

    def mask_mod(self, shape: torch.Size) -> PointMask:
        return lambda b, h, q_idx, kv_idx: ~pick(self.mask, b, h, q_idx, kv_idx)

    @property
    def text(self) -> str:
        return f"Drop({shape_text(self.mask.shape)})"


def _check_bool(mask: object) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise no_mask(mask)
