"""Masks by lengths, one for each sequence: Padding and PrefixLM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from regard.errors import dtype_text, kind_text, shape_text
from regard.masks.key_bounds import KeyBounds
from regard.masks.mask import Mask, PointMask, pick
from regard.scores.box import Box, broadcast_index

__all__ = ["Padding", "PrefixLM", "fits"]


@dataclass(frozen=True, eq=False, repr=False, init=False)
class _Lengths(Mask):
    """A mask that needs one number of keys for each sequence."""

    lengths: Tensor
    _counts: ClassVar[str]

    def __init__(self, lengths: Tensor | Sequence[int] | int) -> None:
        try:
            tensor = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise _not_lengths(kind_text(lengths)) from None
        if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise _not_lengths(dtype_text(tensor.dtype))
        object.__setattr__(self, "lengths", tensor)

    def bind(self, shape: torch.Size, device: torch.device) -> Self:
        batch = (shape[0],) if len(shape) > 2 else ()
        lengths = self.lengths
        bound = fits(lengths, (*shape[:-2], 1, 1))
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
                f"    A length counts {self._counts}."
            )
        axes = lengths.shape if bound else (lengths.numel(),) + (1,) * (len(shape) - 1)
        lengths = lengths.to(device).reshape(axes)
        return type(self)(lengths.clone())  # what is known of them must stay true

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(function(self.lengths))

    @cached_property
    def _read(self) -> Tensor:
        """The lengths on the CPU: a device is waited for once, not for every block."""
        return self.lengths.cpu()

    @property
    def text(self) -> str:
        name, flat = type(self).__name__, self.lengths.flatten()
        if flat.numel() > 8:
            return f"{name}({flat.numel()} lengths)"
        lengths = cast(list[int], flat.tolist())
        return f"{name}({lengths if self.lengths.ndim else lengths[0]})"


class Padding(_Lengths):
    """Keys at or beyond each sequence's length may not be attended to (padding on the right).

    Args:
        lengths: the number of real keys, one for every entry of the first axis (the batch); one
            number for a matrix without a batch axis, or for all sequences.

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

    _counts = "the real keys of one sequence"

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        lengths = broadcast_index(self._read, leading)
        return KeyBounds(slice(0, int(lengths.max())), slice(0, int(lengths.min())))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        lengths = broadcast_index(self.lengths, box.leading)
        return torch.arange(box.columns.start, box.columns.stop, device=device) < lengths

    def mask_mod(self, shape: torch.Size) -> PointMask:
        lengths = self.lengths[..., 0, 0]
        return lambda b, h, _q_idx, kv_idx: kv_idx < pick(lengths, b, h)


class PrefixLM(_Lengths):
    """All queries attend to the first ``lengths`` keys, and beyond them to what came before.

    A prompt that is read in both directions and a text that is written after it. Where q_len and
    kv_len differ, the last query sits at the last key, as in ``Causal()``; the prefix is always
    the first keys. The same as ``Causal() | Padding(lengths)``.

    Args:
        lengths: the number of keys in the prefix, one for every entry of the first axis (the
            batch), or one number for all.

    Raises:
        TypeError: lengths are not whole numbers.
        ValueError: not one for each entry of the batch, or outside 0 to kv_len.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(4, 1)
        >>> regard.attend(x, x, mask=regard.PrefixLM(2)).to_dense()
        tensor([[0.5000, 0.5000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.3333, 0.3333, 0.3333, 0.0000],
                [0.2500, 0.2500, 0.2500, 0.2500]])

    Source:
        Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer", section 3.2.1.
    """

    _counts = "the keys of one prefix"

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        lengths, kv_len = broadcast_index(self._read, leading), shape[-1]
        first = rows.start + kv_len - shape[-2]  # the position of the first of these queries
        last = rows.stop - 1 + kv_len - shape[-2]
        some = max(int(lengths.max()), min(last + 1, kv_len))
        return KeyBounds(slice(0, some), slice(0, max(int(lengths.min()), first + 1)))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        positions = torch.arange(box.rows.start, box.rows.stop, device=device) + (
            shape[-1] - shape[-2]
        )
        kv_idx = torch.arange(box.columns.start, box.columns.stop, device=device)
        return kv_idx < torch.maximum(
            broadcast_index(self.lengths, box.leading), positions[:, None] + 1
        )

    def mask_mod(self, shape: torch.Size) -> PointMask:
        lengths, shift = self.lengths[..., 0, 0], shape[-1] - shape[-2]
        return lambda b, h, q_idx, kv_idx: (
            (kv_idx < pick(lengths, b, h)) | (kv_idx <= q_idx + shift)
        )


def fits(tensor: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether the tensor has these axes, each full or 1."""
    same = tensor.ndim == len(axes)
    return same and all(n in (1, full) for n, full in zip(tensor.shape, axes, strict=True))


def _not_lengths(came: str) -> TypeError:
    return TypeError(
        f"lengths is {came}; it must be whole numbers, one for each sequence.\n"
        "    For a bool mask of the keys use attention_mask[:, None, None, :].bool()."
    )
