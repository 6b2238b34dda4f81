"""Masks by the lengths of the sequences: Padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from regard.errors import dtype_text, kind_text, shape_text
from regard.indexing import Box, narrow
from regard.masks.mask import Columns, Mask

__all__ = ["Padding"]


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

    def columns(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> Columns:
        lengths = narrow(self.lengths, leading)
        return Columns(slice(0, int(lengths.max())), slice(0, int(lengths.min())))

    def block(self, box: Box, shape: torch.Size, device: torch.device) -> Tensor:
        lengths = narrow(self.lengths, box.leading)
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
