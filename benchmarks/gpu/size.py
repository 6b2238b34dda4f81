"""What is measured at: lengths, widths, heads, masks; and the tensors of that size."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from benchmarks.tensors import Inputs

__all__ = ["GOALS_AT", "KV_HEADS", "LENGTHS", "NUM_HEADS", "Size", "inputs", "sizes"]

GOALS_AT = (16_384, 128)  # tokens and head_dim
LENGTHS = tuple(2**power for power in range(11, 18))  # 2k to 128k
HEAD_DIMS = (128, 64)
KV_HEADS = (8, 64)
NUM_HEADS = 64


@dataclass(frozen=True)
class Size:
    """One sequence of 64 heads.

    Attributes:
        tokens: the length, of queries and of keys.
        head_dim: the width of query and key.
        num_kv_heads: how many heads the key has.
        causal: whether a query sees only what came before it.
        num_heads: how many heads the query has.
    """

    tokens: int
    head_dim: int
    num_kv_heads: int
    causal: bool
    num_heads: int = NUM_HEADS

    @property
    def of_heads(self) -> tuple[int, int, int]:
        """What the kernels are chosen by."""
        return self.head_dim, self.num_heads, self.num_kv_heads

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key are seen, over all heads."""
        seen = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens**2
        return self.num_heads * seen

    @property
    def score_flops(self) -> int:
        """Of the score product alone, q kᵀ; a forward has twice as many."""
        return 2 * self.pairs * self.head_dim

    @property
    def text(self) -> str:
        """In a line of the report."""
        mask = "causal" if self.causal else "full"
        return f"{self.tokens:>7,}  d {self.head_dim:<3}  {self.num_kv_heads:>2} kv heads  {mask:6}"

    def longer(self, tokens: int) -> "Size":
        """The same at another length."""
        return Size(tokens, self.head_dim, self.num_kv_heads, self.causal, self.num_heads)


def sizes(lengths: Sequence[int] = LENGTHS) -> list[Size]:
    """All of them, those with goals first, then the shortest: left out are the longest."""
    kinds = product(sorted(lengths), HEAD_DIMS, KV_HEADS, (True, False))
    return sorted((Size(*kind) for kind in kinds), key=lambda size: size.tokens != GOALS_AT[0])


def inputs(size: Size, device: str, sets: int, seed: int = 0) -> list[Inputs]:
    """Random query, key and value in bfloat16, several times."""
    generator = torch.Generator(device).manual_seed(seed)

    def numbers(heads: int) -> torch.Tensor:
        shape = (1, heads, size.tokens, size.head_dim)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(torch.bfloat16)

    heads = (size.num_heads, size.num_kv_heads, size.num_kv_heads)
    return [Inputs(*map(numbers, heads)) for _ in range(sets)]
