"""The masks that are compared, each said in the words of every side."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import regard

__all__ = ["CAUSAL", "EVERYTHING", "PADDING", "WIDTH", "WINDOW", "Pattern"]

WIDTH = 256


@dataclass(frozen=True)
class Pattern:
    """One mask, for any number of tokens.

    Attributes:
        ours: regard's word for it.
        theirs: the bool tensor for a fused forward, True where a query may attend; None: no tensor.
        causal: the fused forward's own word, is_causal.
    """

    ours: Callable[[int], regard.Mask | None]
    theirs: Callable[[int], Tensor | None] = lambda _: None
    causal: bool = False


def real(tokens: int) -> int:
    """How many tokens are no padding."""
    return tokens - tokens // 8


def near(tokens: int) -> Tensor:
    """True for the WIDTH keys that end with the query's own, (tokens, tokens)."""
    index = torch.arange(tokens, dtype=torch.int32)  # a matrix of them is large enough
    distance = index[:, None] - index
    return (distance >= 0) & (distance < WIDTH)


EVERYTHING = Pattern(lambda _: None)
CAUSAL = Pattern(lambda _: regard.Causal(), causal=True)
PADDING = Pattern(
    lambda tokens: regard.Padding(real(tokens)),
    lambda tokens: (torch.arange(tokens) < real(tokens))[None],
)
WINDOW = Pattern(lambda _: regard.SlidingWindow(WIDTH - 1, 0), near)
