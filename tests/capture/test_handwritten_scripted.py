"""Hand-written attention in TorchScript, whose arithmetic has overloads of its own for numbers."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from models import noise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TorchScript")


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1)


def divided(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1)


def moved(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + 1.0 - 0.5, -1)


def moved_by_a_multiple(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(torch.add(q @ k.transpose(-1, -2), 0.5, alpha=3), -1)


def taken_from_a_number(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(1.0 - q @ k.transpose(-1, -2), -1)


def in_place(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores *= 0.5
    scores /= 1.5
    scores += 2.0
    scores -= 1.0
    return torch.softmax(scores, -1)


class Layer(nn.Module):
    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.weigh = nn.Linear(7, 7), weigh

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weigh(self.query(x), x)
        return weights, weights @ x


@pytest.mark.parametrize("scripted", [False, True], ids=["Python", "TorchScript"])
@pytest.mark.parametrize(
    "weigh",
    [scaled, divided, moved, moved_by_a_multiple, taken_from_a_number, in_place],
)
def test_arithmetic_with_numbers_is_seen(
    weigh: Callable[[Tensor, Tensor], Tensor], scripted: bool
) -> None:
    with warnings.catch_warnings(action="ignore"):
        model, x = Layer(torch.jit.script(weigh) if scripted else weigh), noise(2, 5, 7)
    with torch.no_grad(), regard.observe(model) as seen:
        weights, _ = model(x)
    torch.testing.assert_close(seen[0].to_dense().reshape(weights.shape), weights)
