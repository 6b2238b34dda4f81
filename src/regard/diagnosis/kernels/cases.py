"""The inputs that a kernel is tried on: each of them has broken kernels of others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from regard.diagnosis.kernels.standard import Standard
from regard.masks import SlidingWindow

LONGEST = 2048
"""The number of tokens of the longest input."""
_TILE = 128

Kind = Literal["random", "sharp", "large", "low", "growing", "falling", "NaN"]


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        q_len: the number of queries.
        kv_len: the number of keys.
        special: what else is special about it, in words.
        kind: the numbers in it: "large" scores are all 200, "low" ones all -200; "growing" and
            "falling" ones lie between, in the order of the keys; with "NaN" the last keys are NaN.
        heads: the number of heads; None: that of the spec.
        kv_heads: the number of heads of keys; None: that of the spec.
        head_dim: the number of columns; None: those that the kernel takes.
        strides: "views": of tensors in another order of axes, and of wider ones; "columns": those
            of the keys do not lie side by side in memory.
        has_gradient: the gradients of query, key and value are compared, too.
    """

    q_len: int
    kv_len: int
    special: str = ""
    kind: Kind = "random"
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    strides: Literal["", "views", "columns"] = ""
    has_gradient: bool = False

    @property
    def words(self) -> str:
        """The case in words, to stand behind "with"."""
        lengths = f"{self.q_len} queries and {self.kv_len} keys"
        if self.q_len == self.kv_len:
            lengths = "one token" if self.q_len == 1 else f"{self.q_len} tokens"
        return ", ".join(filter(None, [self.special, lengths]))

    @property
    def in_tiles(self) -> "Case":
        """The same with lengths that are multiples of a tile, for kernels that refuse others."""
        q_len, kv_len = (-(-length // _TILE) * _TILE for length in (self.q_len, self.kv_len))
        if self.kind == "NaN" or self.q_len == self.kv_len:
            return replace(self, q_len=q_len, kv_len=kv_len)
        longer = {"q_len" if self.q_len > self.kv_len else "kv_len": max(q_len, kv_len) + _TILE}
        return replace(self, **{"q_len": q_len, "kv_len": kv_len, **longer})


FIRST = Case(128, 128)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one case, rounded to the dtype of the kernel.

    Attributes:
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, kv_len, head_dim).
        value: the same shape.
        upstream: the gradient of the output, in the shape of the query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Inputs":
        """Return copies of another device or dtype that share nothing with these."""
        tensors = (self.query, self.key, self.value, self.upstream)
        return Inputs(*(t.detach().to(device, dtype, copy=True) for t in tensors))


def cases_of(standard: Standard, groups: tuple[int, int] | None) -> Iterator[Case]:
    """Yield the inputs to try, a plain one first.

    Args:
        standard: the attention that they are for.
        groups: heads of queries and of keys to try beside those of the spec; None for none.
    """
    yield FIRST
    yield Case(77, 77, has_gradient=True)
    for length in (1, 20, 129, 300, 600):
        yield Case(length, length)
    if isinstance(standard.mask, SlidingWindow):
        length = max(standard.mask.left, standard.mask.right) + _TILE // 2
        if 128 < length <= LONGEST:  # so that the window ends inside
            yield Case(length, length)
    yield Case(5, 133, has_gradient=True)
    yield Case(77, 133, has_gradient=True)
    yield Case(133, 77, has_gradient=True)
    yield Case(77, 77, "sharp scores", "sharp", has_gradient=True)
    yield Case(65, 65, "scores of 200", "large")
    yield Case(65, 65, "scores of -200", "low")
    yield Case(257, 257, "scores from -200 to 200", "growing")
    yield Case(257, 257, "scores from 200 to -200", "falling")
    if standard.mask is not None:
        yield Case(77, 77, "masked keys that are NaN", "NaN")
    yield Case(77, 77, "80 columns", head_dim=80, has_gradient=True)
    if groups is not None:
        heads, kv_heads = groups
        words = f"{heads} heads of queries and {kv_heads} of keys"
        yield Case(77, 77, words, heads=heads, kv_heads=kv_heads, has_gradient=True)
    yield Case(77, 77, "views", strides="views", has_gradient=True)
    yield Case(77, 77, "columns of keys apart in memory", strides="columns", has_gradient=True)
