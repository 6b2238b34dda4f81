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
    with pytest.raises(regard.RegardError, match="makes others of the weights after their softmax"):
        observed(way)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_weights_stacked_as_they_were_are_refused_all_the_same(axis: int) -> None:
    with pytest.raises(regard.RegardError, match="makes others of the weights after their softmax"):
        observed(lambda s, v: torch.stack(s.softmax(-1).unbind(axis), axis) @ v)


def expanded(scores: Tensor, value: Tensor) -> Tensor:
    return scores.softmax(-1)[:, :1].expand(-1, H, -1, -1) @ value


def heads_for_texts(scores: Tensor, value: Tensor) -> Tensor:
    return scores.softmax(-1).reshape(H, B, T, T).transpose(0, 1) @ value


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(expanded, id="one head for all"),
        pytest.param(heads_for_texts, id="heads taken for texts"),
    ],
)
def test_weights_that_meet_the_value_in_another_order_are_refused(way: Way) -> None:
    with pytest.raises(regard.RegardError, match="makes others of the weights"):
        observed(way)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(lambda s, v: s.softmax(-1)[..., 1:] @ v[:, :, 1:], id="keys left out"),
        pytest.param(lambda s, v: s.softmax(-1)[:, 1:] @ v[:, 1:], id="a head left out"),
        pytest.param(lambda s, v: s.softmax(-1)[:, :, -1:].expand_as(s) @ v, id="one query"),
    ],
)
def test_weights_some_of_which_meet_no_value_are_refused(way: Way) -> None:
    sentence = r"some of the weights of the softmax .* meet a value on their own"
    with pytest.raises(regard.RegardError, match=sentence):
        observed(way)


def by_heads(scores: Tensor, value: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    return torch.stack([weights[:, h] @ value[:, h] for h in range(H)], 1)


def by_keys(scores: Tensor, value: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    blocks = zip(weights.split(2, -1), value.split(2, 2), strict=True)
    return sum((w @ v for w, v in blocks), start=torch.zeros_like(value))


def by_rows(scores: Tensor, value: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    rows = [weights[:, :, i : i + 1, : i + 1] @ value[:, :, : i + 1] for i in range(T)]
    return torch.cat(rows, 2)


def with_sink(scores: Tensor, value: Tensor) -> Tensor:
    weights = torch.cat([scores, torch.zeros(B, H, T, 1)], -1).softmax(-1)
    return weights[..., :-1] @ value


def merged(scores: Tensor, value: Tensor) -> Tensor:
    weights, value = scores.softmax(-1).flatten(0, 1), value.flatten(0, 1)
    return torch.cat([w @ v for w, v in zip(weights.split(4), value.split(4), strict=True)])


def written_out(scores: Tensor, value: Tensor) -> Tensor:
    return (scores.softmax(-1)[..., None] * value[:, :, None]).sum(-2)


def cell_by_cell(scores: Tensor, value: Tensor) -> Tensor:
    weights, output = scores.softmax(-1), torch.zeros_like(value)
    for j in range(T):
        output += weights[..., j, None] * value[:, :, j : j + 1]
    return output


@pytest.mark.parametrize("way", [cell_by_cell, written_out])
def test_products_of_elements_that_are_added_are_refused(way: Way) -> None:
    with pytest.raises(regard.RegardError, match=r"mul .* makes others of the weights after"):
        observed(way)


@pytest.mark.parametrize("way", [by_heads, by_keys, by_rows, merged])
def test_weights_that_meet_the_value_in_parts_are_refused(way: Way) -> None:
    sentence = (
        r"some of the weights of the softmax \(.*\) meet a value on their own, as in a loop over "
        r"heads or blocks\.\n    Multiply all weights with the value in one product"
    )
    with pytest.raises(regard.RegardError, match=sentence):
        observed(way)


def with_entropy(scores: Tensor, value: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    return weights @ value + (weights * (weights + 1e-9).log()).sum()


@pytest.mark.parametrize("way", [with_sink, with_entropy])
def test_weights_beside_others_are_kept(way: Way) -> None:
    assert [matrix.shape for matrix in observed(way).values()] == [(B, H, T, T)]


@pytest.mark.parametrize(
    ("change", "did"),
    [
        pytest.param(lambda s: s.softmax(-1).flip(-1), "flip", id="flip"),
        pytest.param(lambda s: s.softmax(-1).roll(1, -1), "roll", id="roll"),
        pytest.param(lambda s: s.softmax(-1) ** 2, "pow", id="squares"),
        pytest.param(lambda s: s.softmax(-1).mean(1, keepdim=True), "mean", id="mean of heads"),
        pytest.param(lambda s: s.softmax(-2), "mul", id="over the queries"),
    ],
)
@pytest.mark.parametrize("product", ["whole", "cells"])
def test_changed_weights_are_refused_where_the_product_with_the_value_is_written_out(
    change: Callable[[Tensor], Tensor], did: str, product: str
) -> None:
    def way(scores: Tensor, value: Tensor) -> Tensor:
        weights = change(scores)
        if product == "whole":
            return (weights[..., None] * value[:, :, None]).sum(-2)
        return sum(
            (weights[..., j, None] * value[:, :, j : j + 1] for j in range(T)),
            start=torch.zeros_like(value),
        )

    with pytest.raises(regard.RegardError, match=rf"cannot be kept: {did} \("):
        observed(way)


def test_masked_scores_that_are_multiplied_with_0_are_refused() -> None:
    with pytest.raises(regard.RegardError, match=r"cannot be kept: mul \(.* stands between"):
        observed(lambda s, v: (s * torch.ones(T, T).tril()).softmax(-1) @ v)


def test_masked_scores_that_are_multiplied_with_1_are_kept() -> None:
    seen = observed(lambda s, v: (s * torch.ones(T)).softmax(-1) @ v)
    assert list(seen) == ["Layer"]
