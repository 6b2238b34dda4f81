"""Masks that take one length for each sequence: Padding and PrefixLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast, final

import torch
from torch import Tensor

from regard.errors import check_numbers, dtype_text, kind_text, shape_text
from regard.masks.bands import Causal
from regard.masks.mask import KeyBounds, Mask, Points, PositionLimits, fits
from regard.scores.box import broadcast_index


def whole_numbers(name: str, value: object, needed: str) -> Tensor:
    """Return whole numbers that a user passes as a tensor.

    Raises:
        TypeError: the value is something else; the error says what is needed.
    """
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        came = kind_text(value)
    else:
        fractional = tensor.is_floating_point() or tensor.is_complex()
        if not (tensor.dtype == torch.bool or fractional) or not tensor.numel():
            return tensor
        came = dtype_text(tensor.dtype)
    raise TypeError(f"{name} is {came}; it must be whole numbers, {needed}")


def per_sequence(
    name: str,
    tensor: Tensor,
    own: tuple[int, ...],
    shape: torch.Size,
    device: torch.device,
    remark: str,
) -> Tensor:
    """Reshape the numbers of each sequence so that they broadcast to a matrix of this shape.

    The tensor has the shape ``own`` of one sequence, () or (kv_len,), or (batch, *own), where batch
    is the first axis of the matrix. A tensor that has all axes of the matrix is returned as it is.

    Raises:
        ValueError: the tensor has another shape, and the error ends with the remark; or the tensor
            is on the meta device and the matrix is not.
    """
    if device.type != "meta":
        check_numbers(name, tensor.device)
    axes = (*shape[:-2], 1, *(own or (1,)))
    if fits(tensor, axes) and tensor.shape[-1] == axes[-1]:
        return tensor
    shapes = [own, *([(shape[0], *own)] if len(shape) > 2 else [])]
    if tensor.shape not in shapes:
        needed = " or ".join(shape_text(each) if each else "one number" for each in shapes)
        raise ValueError(
            f"{name} has shape {shape_text(tensor.shape)}; a matrix of shape {shape_text(shape)} "
            f"needs {needed}, {remark}"
        )
    sequences = tensor.shape[0] if tensor.ndim > len(own) else 1
    return tensor.reshape(sequences, *(1 for _ in shape[2:]), axes[-1])


@final
@dataclass(frozen=True, eq=False, repr=False, init=False)
class Padding(Mask):
    """A mask that hides the keys at or beyond each sequence's length (padding on the right).

    Args:
        lengths: the number of real keys, one for every entry of the matrix's first axis, or one
            number for all. The first axis is the batch of (batch, num_heads, q_len, kv_len), and
            the heads of (num_heads, q_len, kv_len). ``attend`` copies them: later changes of the
            tensor do not matter.

    Raises:
        TypeError: lengths are not whole numbers.
        ValueError: the number of lengths is wrong, or a length is not between 0 and kv_len.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(2, 1, 3, 1)
        >>> A = regard.attend(x, x, mask=regard.Padding([3, 2]))
        >>> A[:, 0, 0, :]
        tensor([[0.3333, 0.3333, 0.3333],
                [0.5000, 0.5000, 0.0000]])
    """

    thread_safe = True

    lengths: Tensor

    def __init__(self, lengths: Tensor | Sequence[int] | int) -> None:
        needed = (
            "one for each sequence.\n"
            "    For a bool mask of the keys use attention_mask[:, None, None, :].bool()."
        )
        object.__setattr__(self, "lengths", whole_numbers("lengths", lengths, needed))

    def bind(self, shape: torch.Size, device: torch.device) -> Mask:
        remark = "one length for each sequence.\n    A single number applies to all sequences."
        lengths = per_sequence("lengths", self.lengths, (), shape, device, remark)
        wrong = (lengths < 0) | (lengths > shape[-1])
        if bool(wrong.any()):
            value = int(lengths[wrong].flatten()[0])
            raise ValueError(
                f"lengths has {value}; each must be between 0 and kv_len = {shape[-1]}.\n"
                "    A length counts the first keys of one sequence."
            )
        return Padding(lengths.to(device).clone())  # later changes do not reach a copy

    def allows(self, points: Points) -> Tensor:
        return points.kv_idx < points.read(self.lengths)

    def key_bounds(self, leading: tuple[slice, ...], rows: slice, shape: torch.Size) -> KeyBounds:
        lengths = broadcast_index(self._on_cpu, leading)
        return KeyBounds(slice(0, int(lengths.max())), slice(0, int(lengths.min())))

    def limits(self, shape: torch.Size) -> PositionLimits:
        return PositionLimits(lengths=self.lengths)

    def rows(self, rows: range, q_len: int) -> Mask:
        return self

    @property
    def text(self) -> str:
        flat = self.lengths.flatten()
        if flat.numel() > 8:
            return f"Padding({flat.numel()} lengths)"
        lengths = cast(list[int], self._on_cpu.flatten().tolist())
        return f"Padding({lengths if self.lengths.ndim else lengths[0]})"

    @cached_property
    def _on_cpu(self) -> Tensor:
        """The lengths on the CPU, copied once and not for every block."""
        return self.lengths.cpu()


def PrefixLM(lengths: Tensor | Sequence[int] | int) -> Mask:
    """Return the mask of a prefix that all queries attend to, and that is causal after it.

    Use this mask for a prompt with bidirectional attention, followed by generated text. It is
    ``Causal() | Padding(lengths)``.

    Args:
        lengths: the number of keys in the prefix, one for every entry of the matrix's first axis,
            as in ``Padding``, or one number for all.

    Raises:
        TypeError: lengths are not whole numbers.

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
    return Causal() | Padding(lengths)
