"""Masks: which keys a query may attend to. True always means *may attend*.

A mask is a small immutable value; ``bind`` fits it to the shape of a matrix and checks it there.
Rows and columns are aligned at the bottom right when ``q_len != kv_len``: the last query sits at
the last key, as with a KV cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from regard.errors import (
    check_broadcast,
    check_whole,
    dtype_text,
    kind_text,
    shape_text,
    with_article,
)
from regard.indexing import Box, narrow

__all__ = ["Both", "Causal", "Drop", "Keep", "Mask", "Padding", "SlidingWindow", "as_mask"]


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
    def columns(self, rows: slice, shape: torch.Size) -> slice:
        """The narrowest known slice of keys that these rows may attend to; it may be empty."""

    @abstractmethod
    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor | None:
        """True where a key may be attended to, broadcastable to the box; None: everywhere."""

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


@dataclass(frozen=True)
class _Band(Mask):
    """Keys from ``query + low`` to ``query + high``, after the shift that aligns the ends."""

    @abstractmethod
    def _band(self, shape: torch.Size) -> tuple[int | None, int | None]:
        """The lowest and the highest allowed kv_idx - q_idx; None is no limit."""

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        return self

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return self

    def columns(self, rows: slice, shape: torch.Size) -> slice:
        low, high = self._band(shape)
        start = 0 if low is None else min(max(rows.start + low, 0), shape[-1])
        stop = shape[-1] if high is None else min(max(rows.stop + high, 0), shape[-1])
        return slice(start, max(start, stop))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor | None:
        low, high = self._band(shape)
        q_idx = torch.arange(box.rows.start, box.rows.stop, device=device)[:, None]
        kv_idx = torch.arange(box.columns.start, box.columns.stop, device=device)
        allowed: Tensor | None = None
        if high is not None and box.columns.stop - 1 - box.rows.start > high:
            allowed = kv_idx <= q_idx + high
        if low is not None and box.columns.start - (box.rows.stop - 1) < low:
            above = kv_idx >= q_idx + low
            allowed = above if allowed is None else allowed & above
        return allowed


@dataclass(frozen=True)
class Causal(_Band):
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

    def _band(self, shape: torch.Size) -> tuple[int | None, int | None]:
        return None, shape[-1] - shape[-2] if self.align == "bottom-right" else 0

    def __repr__(self) -> str:
        return "Causal()" if self.align == "bottom-right" else f"Causal(align={self.align!r})"


@dataclass(frozen=True)
class SlidingWindow(_Band):
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

    def _band(self, shape: torch.Size) -> tuple[int | None, int | None]:
        shift = shape[-1] - shape[-2]
        return shift - self.left, shift + self.right

    def __repr__(self) -> str:
        return f"SlidingWindow({self.left}, {self.right})"


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Keys at or beyond each sequence's length may not be attended to (padding on the right).

    Args:
        lengths: the number of real keys, one for every entry of the first axis (the batch); one
            number for a matrix without a batch axis.

    Raises:
        TypeError: lengths are not whole numbers.
        ValueError: not one for each entry of the batch, or outside 0 to kv_len.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(2, 1, 3, 1)
        >>> A = regard.attend(x, x, mask=regard.Padding([3, 2]))
        >>> A[:, 0, 0, :]
        tensor([[0.3333, 0.3333, 0.3333],
                [0.5000, 0.5000, 0.0000]])
    """

    lengths: Tensor

    def __init__(self, lengths: Tensor | Sequence[int] | int) -> None:
        try:
            tensor = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise _not_lengths(kind_text(lengths)) from None
        if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise _not_lengths(dtype_text(tensor.dtype))
        object.__setattr__(self, "lengths", tensor)

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        batch = (shape[0],) if len(shape) > 2 else ()
        lengths = self.lengths
        bound = _fits(lengths, (*shape[:-2], 1, 1))
        if not bound and lengths.shape != batch and lengths.ndim > 0:
            raise ValueError(
                f"lengths has shape {shape_text(lengths.shape)}; a matrix of shape "
                f"{shape_text(shape)} needs {shape_text(batch) if batch else 'one number'}, "
                "one length for each sequence.\n    One number stands for all."
            )
        wrong = (lengths < 0) | (lengths > shape[-1])
        if bool(wrong.any()):
            value = int(lengths[wrong].flatten()[0])
            raise ValueError(
                f"lengths has {value}; each must be between 0 and kv_len = {shape[-1]}.\n"
                "    A length counts the real keys of one sequence."
            )
        axes = lengths.shape if bound else (lengths.numel(),) + (1,) * (len(shape) - 1)
        return Padding(lengths.to(device).reshape(axes))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mask:
        return Padding(function(self.lengths))

    def columns(self, rows: slice, shape: torch.Size) -> slice:
        return slice(0, int(self.lengths.max()))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor | None:
        lengths = narrow(self.lengths, (*box.leading, slice(None), slice(None)))
        if int(lengths.min()) >= box.columns.stop:
            return None
        return torch.arange(box.columns.start, box.columns.stop, device=device) < lengths

    def __repr__(self) -> str:
        flat = self.lengths.flatten()
        if flat.numel() > 8:
            return f"Padding({flat.numel()} lengths)"
        lengths = cast(list[int], flat.tolist())
        return f"Padding({lengths if self.lengths.ndim else lengths[0]})"


def _fits(lengths: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether the tensor has these axes, each full or 1."""
    same = lengths.ndim == len(axes)
    return same and all(n in (1, full) for n, full in zip(lengths.shape, axes, strict=True))


def _not_lengths(came: str) -> TypeError:
    return TypeError(
        f"lengths is {came}; it must be whole numbers, one for each sequence.\n"
        "    For a bool mask of the keys use attention_mask[:, None, None, :].bool()."
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

    def columns(self, rows: slice, shape: torch.Size) -> slice:
        return slice(0, shape[-1])

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor | None:
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

    def columns(self, rows: slice, shape: torch.Size) -> slice:
        return slice(0, shape[-1])

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor | None:
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

    def columns(self, rows: slice, shape: torch.Size) -> slice:
        first, second = self.first.columns(rows, shape), self.second.columns(rows, shape)
        start, stop = max(first.start, second.start), min(first.stop, second.stop)
        return slice(start, max(start, stop))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor | None:
        first = self.first.block(box, shape, device)
        second = self.second.block(box, shape, device)
        if first is None or second is None:
            return second if first is None else first
        return first & second

    def __repr__(self) -> str:
        return f"{self.first!r} & {self.second!r}"
