"""Code that writes into what it gets: each run of a check has tensors of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard


def scaled_by_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q *= q.shape[-1] ** -0.5
    return (q @ k.mT).softmax(-1) @ v


def scaled_by_method(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q.mul_(q.shape[-1] ** -0.5)
    return (q @ k.mT).softmax(-1) @ v


class Residual(nn.Module):
    """Adds what attention gives to its input, in place."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16) if joined else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x += self.out((q @ k.mT / 4).softmax(-1) @ v)
        return x


def scaled_by_option(q: Tensor, k: Tensor, v: Tensor, *, scale: Tensor) -> Tensor:
    scale.rsqrt_()
    return (q @ k.mT * scale).softmax(-1) @ v


@pytest.mark.parametrize("attention", [scaled_by_operator, scaled_by_method])
def test_queries_that_are_scaled_in_place_are_wrong(attention: Callable[..., Tensor]) -> None:
    finding = regard.check(attention).faults[0]
    assert finding.name == "pure"
    assert finding.detail.startswith("The argument q is changed in place.")
    assert finding.code.startswith("q")


@pytest.mark.parametrize("joined", [False, True], ids=["without a last layer", "with one"])
def test_an_input_that_is_added_to_in_place_is_wrong(joined: bool) -> None:
    finding = regard.check(Residual(joined=joined)).faults[0]
    assert (finding.name, finding.code.partition("(")[0]) == ("pure", "x += self.out")


def test_an_option_of_the_caller_stays_as_it_was() -> None:
    scale = torch.tensor(24.0)
    assert regard.check(scaled_by_option, scale=scale).faults[0].name == "pure"
    assert scale.item() == 24
