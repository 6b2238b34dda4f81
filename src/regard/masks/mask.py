"""What a mask is, and how masks combine. True always means *may attend*.

A mask is a small immutable value; ``bind`` fits it to the shape of a matrix and checks it there.
Rows and columns are aligned at the bottom right when ``q_len != kv_len``: the last query sits at
the last key, as with a KV cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import check_broadcast, dtype_text, kind_text, shape_text, with_article
from regard.indexing import Box, narrow

__all__ = ["Both", "Columns", "Drop", "Keep", "Mask", "as_mask"]


class Columns(NamedTuple):
    """What a mask knows of some rows without looking at every key, so that work is skipped.

    Attributes:
        some: outside these keys none of the rows attends to anything; may be empty.
        every: to these keys all of the rows may attend, so nothing is masked there; a part of
            ``some``, may be empty.
    """

    some: slice
    every: slice


class Mask(ABC):
    """Which keys a query may attend to; combine masks with ``&`` (both must allow).

    Example:
        >>> import regard
        >>> regard.Causal() & regard.Padding([3, 5])
        Causal() & Padding([3, 5])
    """

    @abstractmethod
    def bind(self, shape: torch.Size, device: torch.device) -> "Mask":
        """The mask fitted to a matrix of this shape; its tensors get all axes, full or 1."""

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Mask":
        """The same mask with the function applied to every tensor of a bound mask."""

    @abstractmethod
    def columns(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> Columns:
        """Which keys these rows of these heads can attend to, as narrow as is quickly known.

        Args:
            leading: a slice with a start and a stop for each leading axis of the matrix.
            rows: the queries.
            shape: the shape of the matrix, (..., num_heads, q_len, kv_len).
        """

    @abstractmethod
    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        """True where a key may be attended to, broadcastable to the box."""

    def __and__(self, other: object) -> "Mask":
        """Both masks must allow."""
        return Both(self, as_mask(other))

    def __rand__(self, other: object) -> "Mask":
        """Both masks must allow."""
        return Both(as_mask(other), self)


def as_mask(mask: object) -> Mask:
    """The mask itself, or a bool tensor (True = may attend) as a mask.

    Raises:
        TypeError: anything else.
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return Keep(mask)
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise TypeError(
            f"mask is the class {mask.__name__}; it must be an instance.\n"
            f"    Use {mask.__name__}(...)."
        )
    came = kind_text(mask)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(mask, Tensor):
        came = with_article(f"{dtype_text(mask.dtype)} tensor")
    raise TypeError(
        f"mask is {came}; a mask is a bool tensor (True = may attend) or one of regard.masks.\n"
        "    To add numbers to the scores, pass bias=. For nn.MultiheadAttention's convention "
        "(True = may not), use Drop(mask)."
    )


@dataclass(frozen=True, eq=False)
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

    def columns(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> Columns:
        return Columns(slice(0, shape[-1]), slice(0, 0))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return narrow(self.mask, box.at_both)

    def __repr__(self) -> str:
        return f"Keep({shape_text(self.mask.shape)})"


@dataclass(frozen=True, eq=False)
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

    def columns(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> Columns:
        return Columns(slice(0, shape[-1]), slice(0, 0))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return ~narrow(self.mask, box.at_both)

    def __repr__(self) -> str:
        return f"Drop({shape_text(self.mask.shape)})"


def _check_bool(mask: object) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        as_mask(mask)


@dataclass(frozen=True, eq=False)
class Both(Mask):
    """Two masks that must both allow: what ``first & second`` gives."""

    first: Mask
    second: Mask

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return Both(self.first.bind(shape, device), self.second.bind(shape, device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return Both(self.first.map(function), self.second.map(function))

    def columns(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> Columns:
        first = self.first.columns(leading, rows, shape)
        second = self.second.columns(leading, rows, shape)
        return Columns(_overlap(first.some, second.some), _overlap(first.every, second.every))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        return self.first.block(box, shape, device) & self.second.block(box, shape, device)

    def __repr__(self) -> str:
        return f"{self.first!r} & {self.second!r}"


def _overlap(first: slice, second: slice) -> slice:
    start, stop = max(first.start, second.start), min(first.stop, second.stop)
    return slice(start, max(start, stop))
