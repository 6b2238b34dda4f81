"""Where the batch, the tokens and the heads stand in what people hand over and give back.

Everything that is compared is canonical: (batch, tokens, columns), the heads side by side in the
columns as a projection leaves them.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = ["Layout", "Order"]

Order = Literal["btd", "td", "tbd", "bhtd", "bthd"]

_AXES = {
    "btd": "(batch, tokens, dim)",
    "td": "(tokens, dim)",
    "tbd": "(tokens, batch, dim)",
    "bhtd": "(batch, heads, tokens, dim)",
    "bthd": "(batch, tokens, heads, dim)",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a tensor that somebody's attention takes and gives, and how long they are.

    Attributes:
        order: the axes, by their letters: batch, tokens, heads, dim.
        batch: 1 where there is no axis for it.
        tokens: how many.
        dim: the width of a token, of all its heads together.
        num_heads: of the tensor's own axis, 1 where it has none.
        num_kv_heads: likewise, of key and value.
    """

    order: Order
    batch: int
    tokens: int
    dim: int
    num_heads: int = 1
    num_kv_heads: int = 1

    @property
    def axes(self) -> str:
        """The axes in words: ``(batch, tokens, dim)``."""
        return _AXES[self.order]

    def encode(self, canonical: Tensor, num_heads: int) -> Tensor:
        """A canonical tensor, (batch, tokens, columns), as this layout has it."""
        match self.order:
            case "btd":
                return canonical
            case "td":
                return canonical[0]
            case "tbd":
                return canonical.transpose(0, 1)
            case "bthd":
                return canonical.reshape(*canonical.shape[:-1], num_heads, -1)
            case "bhtd":
                return canonical.reshape(*canonical.shape[:-1], num_heads, -1).transpose(1, 2)

    def decode(self, tensor: Tensor) -> Tensor | None:
        """What was given back as a canonical tensor; None where its shape is another."""
        if tensor.ndim != len(self.order):
            return None
        match self.order:
            case "btd":
                canonical = tensor
            case "td":
                canonical = tensor[None]
            case "tbd":
                canonical = tensor.transpose(0, 1)
            case "bthd":
                canonical = tensor.flatten(-2)
            case "bhtd":
                canonical = tensor.transpose(1, 2).flatten(-2)
        return canonical if canonical.shape[:1] == (self.batch,) else None
