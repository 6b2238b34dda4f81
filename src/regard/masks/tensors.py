"""Masks that are bool tensors, in which True means *may attend*, or the opposite."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from regard.errors import check_broadcast, refuse_sharded, shape_text
from regard.masks.mask import NO_KEYS, KeyBounds, Mask, Points, no_mask


@final
@dataclass(frozen=True, eq=False, repr=False)
class Keep(Mask):
    """A bool tensor in which True means *may attend*, as in ``scaled_dot_product_attention``.

    Args:
        mask: bool, broadcastable to (..., num_heads, q_len, kv_len). For padding of shape
            (batch, kv_len) pass ``mask[:, None, None, :]``. A mask without the two extra axes is
            read as (q_len, kv_len), and if batch = q_len no error shows the mistake. The tensor is
            not copied: a matrix raises an error if it was changed in place after ``attend``.
            PyTorch does not count changes in inference mode and through NumPy.

    Raises:
        TypeError: mask is not a bool tensor.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Keep(torch.tensor([True, False, True])))[0]
        tensor([0.5000, 0.0000, 0.5000])
    """

    thread_safe = True

    mask: Tensor

    def __post_init__(self) -> None:
        _check_bools(self.mask)

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Keep(check_broadcast("mask", self.mask, shape, device))

    def allows(self, points: Points) -> Tensor:
        return points.read(self.mask)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        return KeyBounds(slice(0, shape[-1]), NO_KEYS)

    def rows(self, rows: range, q_len: int) -> Mask:
        whole = self.mask.shape[-2] == 1
        return Keep(self.mask if whole else self.mask[..., rows.start : rows.stop, :])

    @property
    def text(self) -> str:
        return f"Keep({shape_text(self.mask.shape)})"


def Drop(mask: Tensor) -> Keep:
    """Return the mask of a bool tensor in which True means *may not attend*.

    ``nn.MultiheadAttention`` has this convention. The result is ``Keep(~mask)``, a copy.

    Args:
        mask: bool, broadcastable to (..., num_heads, q_len, kv_len).

    Raises:
        TypeError: mask is not a bool tensor.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Drop(torch.tensor([False, True, False])))[0]
        tensor([0.5000, 0.0000, 0.5000])
    """
    _check_bools(mask)
    return Keep(~mask)


def _check_bools(mask: object) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise no_mask(mask)
    refuse_sharded("mask", mask)
