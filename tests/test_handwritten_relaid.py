"""Weights that are laid out anew, or changed, between their softmax and the value."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from models import noise

B, H, T = 3, 2, 5
Way = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Causal attention, whatever becomes of its scores and its value."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(B, T, H, 4).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        masked = torch.ones(T, T, dtype=torch.bool).triu(1)
        return self.way((q @ k.mT / 2).masked_fill(masked, -math.inf), v)


def observed(way: Way) -> regard.Recording:
    model = Layer(way)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(B, T, 8))
    return seen


def rows_backwards(scores: Tensor, value: Tensor) -> Tensor:
    weights = torch.empty_like(scores)
    for i in range(T):
        weights[:, :, T - 1 - i] = scores[:, :, i].softmax(-1)
    return weights @ value


STACKS = [
    pytest.param(lambda s, v: torch.stack(s.softmax(-1).unbind(1)[::-1], 1) @ v, id="heads"),
    pytest.param(lambda s, v: torch.stack(s.softmax(-1).unbind(2)[::-1], 2) @ v, id="queries"),
    pytest.param(lambda s, v: torch.stack(s.softmax(-1).unbind(3)[::-1], 3) @ v, id="keys"),
    pytest.param(lambda s, v: torch.stack([s.softmax(-1)[:, 1]] * 2, 1) @ v, id="one head twice"),
    pytest.param(rows_backwards, id="rows put in backwards"),
]


@pytest.mark.parametrize("way", STACKS)
def test_weights_put_together_in_another_order_are_refused(way: Way) -> None:
    with pytest.raises(regard.RegardError, match="puts weights together after their softmax"):
        observed(way)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_weights_stacked_as_they_were_are_kept(axis: int) -> None:
    seen = observed(lambda s, v: torch.stack(s.softmax(-1).unbind(axis), axis) @ v)
    assert list(seen) == ["Layer"]


def test_queries_that_are_stacked_where_keys_were_are_refused() -> None:
    with pytest.raises(regard.RegardError, match="runs over another axis"):
        observed(lambda s, v: torch.stack(s.softmax(-1).unbind(2), 3) @ v)
