"""The cost of watching a decoder of four blocks, with attention by hand or fused."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import regard
from benchmarks.case import Case, Effort, Measured
from benchmarks.observe import with_its_heap
from benchmarks.turns import Work, ratio

__all__ = ["CASES"]

DIM, HEADS, BLOCKS = 512, 8, 4


class Layer(nn.Module):
    """A block of a decoder; its attention is a softmax of scores, or fused."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.before, self.after = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value, self.output = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        query, key, value = (
            project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.mT / math.sqrt(DIM / HEADS)
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.after(x))))


def watched(effort: Effort, *, fused: bool) -> Measured:
    """Return the time of an observed forward in unobserved ones."""
    model = nn.Sequential(*[Layer(fused=fused) for _ in range(BLOCKS)]).eval()
    x = torch.randn(1, effort.tokens, DIM)

    def forward(watch: Any) -> Work:
        def work() -> object:
            block: AbstractContextManager[object] = watch(model)
            with torch.no_grad(), block as seen:
                model(x)
            return seen

        return work

    ours, peer = forward(regard.observe), forward(lambda _: nullcontext())
    return ratio(ours, peer, max(15, effort.repetitions) if effort.repetitions > 1 else 1)


FUSED = Case(
    "blocks",
    "fused attention",
    "unobserved forwards",
    partial(watched, fused=True),
    (64, 512, 1024, 2048),
    {2048: 1.05},
)
CASES = (
    Case(
        "blocks",
        "attention by hand",
        "unobserved forwards",
        partial(watched, fused=False),
        (64, 512, 1024),
        {512: 3.0, 1024: 2.5},
    ),
    FUSED,
    with_its_heap(FUSED),
)
