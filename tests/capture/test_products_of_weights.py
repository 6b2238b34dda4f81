"""Weights that a product mixes: over their heads, with each other, or with an inverse."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import regard

HEADS, WIDTH = 3, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def parts(self, x: Tensor) -> list[Tensor]:
        layers = (self.query, self.key, self.value)
        return [layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in layers]


class MixedHeads(Attention):
    def __init__(self, *, learned: bool, dim: int) -> None:
        super().__init__()
        numbers = torch.rand(HEADS, HEADS)
        self.mixture = nn.Parameter(numbers) if learned else numbers
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x)
        weights = (query @ key.mT).softmax(-1)
        mixture = self.mixture.softmax(self.dim)
        if self.dim == 0:
            self.weights = torch.einsum("gh,bgnm->bhnm", mixture, weights)
        else:
            self.weights = torch.einsum("hg,bgnm->bhnm", mixture, weights)
        return self.weights @ value


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "fixed"])
def test_heads_that_einsum_mixes_are_recorded(*, learned: bool, dim: int) -> None:
    model = MixedHeads(learned=learned, dim=dim)
    with torch.no_grad(), regard.observe(model) as seen:
        model(torch.randn(2, 5, WIDTH))
    torch.testing.assert_close(seen[0].to_dense(), model.weights)


class Penalised(Attention):
    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.used = used

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.parts(x)
        weights = (query @ key.mT).softmax(-1)
        penalty = (weights @ weights.mT - torch.eye(x.shape[1])).square().sum()
        return (weights @ value if self.used else value), penalty


def test_a_penalty_on_weights_that_meet_a_value_is_ignored() -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        with regard.observe(model := Penalised(used=True)) as seen:
            model(torch.randn(2, 5, WIDTH))
    assert len(seen) == 1


def test_weights_that_meet_a_penalty_alone_are_refused() -> None:
    model, x = (
        nn.Sequential(regard.nn.SelfAttention(WIDTH), Penalised(used=False)),
        torch.randn(2, 5, WIDTH),
    )
    refused = pytest.warns(regard.RefusedWarning, match="met no value")
    with torch.no_grad(), refused, regard.observe(model) as seen:
        model(x)
    assert list(seen) == ["0"]


class Nystrom(Attention):
    def __init__(self, *, iterated: bool) -> None:
        super().__init__()
        self.iterated = iterated

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x)
        few_queries, few_keys = (each.unflatten(2, (3, -1)).mean(3) for each in (query, key))
        first = (query @ few_keys.mT).softmax(-1)
        middle = (few_queries @ few_keys.mT).softmax(-1)
        last = (few_queries @ key.mT).softmax(-1)
        inverse = torch.linalg.pinv(middle)
        if self.iterated:  # as in Nyströmformer
            inverse = middle.mT / middle.sum(-2).amax()
            for _ in range(4):
                inverse = inverse @ (2 * torch.eye(3) - middle @ inverse)
        return first @ inverse @ (last @ value)


@pytest.mark.parametrize("iterated", [True, False], ids=["iterated", "pinv"])
def test_products_of_several_softmaxes_are_refused(*, iterated: bool) -> None:
    model = nn.Sequential(regard.nn.SelfAttention(WIDTH), Nystrom(iterated=iterated))
    refused = pytest.warns(regard.RefusedWarning, match="'1'")
    with torch.no_grad(), refused, regard.observe(model) as seen:
        model(torch.randn(2, 6, WIDTH))
    assert list(seen) == ["0"]
    assert len(seen.refused) == 1
