"""The value tensors of attention, recorded together with the keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.capture.generation import Place, extended
from regard.capture.tensor_copies import TensorCopies

__all__ = ["TakeValue", "Values"]

TakeValue = Callable[[Tensor], None]
"""A function that receives the value tensor of an attention."""

_NEVER_SEEN = (
    "no product of its weights with a value was seen that tells which value is whose.\n"
    '    Write it as weights @ value over the keys, or observe with keep="qk".'
)


class Values:
    """The value of one attention, merged over its calls in the same way as its keys.

    ``trouble`` is the reason why it cannot be recorded; None without one. ``in_graph`` is the value
    of the last call as a part of autograd's graph; None without gradients.
    """

    def __init__(self, tensor_copies: TensorCopies) -> None:
        self.trouble: str | None = None
        self.in_graph: Tensor | None = None
        self._tensor_copies = tensor_copies
        self._kept: Tensor | None = None
        self._place: Place | None = None
        self._shape = torch.Size()
        self._missing = False

    def expect(self, place: Place | None, shape: torch.Size) -> None:
        """Prepare for the value of the call that has just run, at this place in its run.

        ``shape`` is that of its matrix, (..., num_heads, q_len, kv_len).
        """
        if self._missing:
            self.trouble = self.trouble or _NEVER_SEEN
        self._place, self._shape, self._missing = place, shape, True

    def add(self, value: Tensor) -> None:
        """Copy the value of the last call, (..., num_kv_heads, kv_len, head_dim)."""
        if self.trouble is not None or not self._missing:
            return
        self._missing = False
        if not _fits(value, self._shape):
            self.trouble = (
                f"its value has shape {tuple(value.shape)}; its matrix has {tuple(self._shape)}.\n"
                '    Observe with keep="qk".'
            )
            return
        # All entries of a batch may share one value.
        value = value.expand(*self._shape[:-3], *value.shape[-3:])
        place = self._place
        if place is None:
            self._kept = self._tensor_copies.copy(value)
        elif place.known < place.stop and self._kept is not None:
            first = place.base + place.known
            more = value[..., place.known : place.stop, :]
            self._kept = extended(self._kept, first, more, self._tensor_copies.empty)

    def whole(self, kv_len: int) -> Tensor | None:
        """Return the merged value, (..., num_kv_heads, kv_len, head_dim).

        If the result is None, ``trouble`` is the reason.
        """
        if self._missing:
            self.trouble = self.trouble or _NEVER_SEEN
        if self.trouble is not None or self._kept is None:
            return None
        # The buffer may have room for keys that were never added.
        return self._kept[..., :kv_len, :].contiguous()


def _fits(value: Tensor, shape: torch.Size) -> bool:
    """Return True if a value has one vector per key, and num_kv_heads divides num_heads."""
    if value.ndim != len(shape) or value.shape[-2] != shape[-1]:
        return False
    batches = zip(value.shape[:-3], shape[:-3], strict=True)
    return all(n in (1, m) for n, m in batches) and (
        len(shape) == 2 or shape[-3] % value.shape[-3] == 0
    )
