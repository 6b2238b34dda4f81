"""Weights that others were made of are refused where these meet the value, and only there."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from models import noise

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
Change = Callable[[nn.Module, Tensor], Tensor]

CAUSAL = torch.ones(7, 7).tril()
REMEDY = "Mask, scale and reorder before the softmax, and multiply its weights with the value."


class Mixing(nn.Module):
    """Three heads, and something made of their weights."""

    def __init__(self, change: Change, *, meets: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.heads, self.mixture = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 3))
        self.change, self.meets = change, meets

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (
            y.unflatten(-1, (3, 2)).transpose(1, 2) for y in (self.query(x), self.key(x), x)
        )
        weights = (query @ key.mT).softmax(-1)
        changed = self.change(self, weights)
        return (changed if self.meets else weights) @ value, changed


def deep_vit(model: nn.Module, w: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", w, model.mixture)


def cait(model: nn.Module, w: Tensor) -> Tensor:
    return model.heads(w.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def largest(model: nn.Module, w: Tensor) -> Tensor:
    values, index = w.topk(3, -1)
    return torch.zeros_like(w).scatter_(-1, index, values)


def largest_made_whole(model: nn.Module, w: Tensor) -> Tensor:
    values, index = w.topk(3, -1)
    return torch.zeros_like(w).scatter(-1, index, values / values.sum(-1, keepdim=True))


def in_chunks(model: nn.Module, w: Tensor) -> Tensor:
    return torch.cat((w[:, :, :4], w[:, :, 4:]), 2)


def doubled_in_place(model: nn.Module, w: Tensor) -> Tensor:
    return w.detach().clone().mul_(2)


CHANGES = [
    pytest.param(deep_vit, id="heads by einsum"),
    pytest.param(cait, id="heads by Linear"),
    pytest.param(largest, id="largest"),
    pytest.param(largest_made_whole, id="largest, whole"),
    pytest.param(lambda _, w: w.softmax(-1), id="softmax again"),
    pytest.param(lambda _, w: w.mean(1, keepdim=True), id="mean"),
    pytest.param(lambda _, w: w.sum(1, keepdim=True), id="sum"),
    pytest.param(lambda _, w: w.amax(1, keepdim=True), id="maximum"),
    pytest.param(
        lambda _, w: F.pad(w, (0, 1)).unflatten(-1, (2, 4)).sum(-1).repeat(1, 1, 1, 4)[..., :7],
        id="sums of padded parts",
    ),
    pytest.param(
        lambda _, w: F.avg_pool1d(w.flatten(0, 1), 3, 1, 1).view_as(w),
        id="pooled",
    ),
    pytest.param(
        lambda _, w: torch.complex(w, w).imag.square(),
        id="complex numbers",
    ),
    pytest.param(lambda _, w: w.cumsum(-1), id="sums so far"),
    pytest.param(lambda _, w: w.pow(2), id="squares"),
    pytest.param(lambda _, w: torch.where(CAUSAL > 0, w, w.mT), id="where"),
    pytest.param(lambda _, w: w @ w, id="squared"),
    pytest.param(lambda _, w: w * 2, id="doubled"),
    pytest.param(doubled_in_place, id="doubled in place"),
    pytest.param(lambda _, w: w * (CAUSAL * 2), id="twice a mask"),
    pytest.param(in_chunks, id="cat"),
    pytest.param(lambda _, w: torch.stack(w.unbind(1), 1), id="stack"),
    pytest.param(lambda _, w: w[:, torch.tensor([2, 0, 1])], id="index"),
    pytest.param(lambda _, w: w.flip(-1), id="flip"),
    pytest.param(lambda _, w: w.roll(1, -1), id="roll"),
    pytest.param(lambda _, w: w + w.mT, id="added"),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_others_that_meet_the_value_are_refused_with_what_helps(
    change: Change, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model = Mixing(change)
    with pytest.raises(regard.RegardError) as refusal, mode(), regard.observe(model):
        model(noise(2, 7, 6))
    first, found = str(refusal.value).splitlines()
    assert first.startswith("the attention of 'Mixing' cannot be kept: ")
    assert f"{__file__}:" in first
    assert f") makes others of the weights after their softmax ({__file__}:" in first
    assert first.endswith("; what meets the value is no softmax of the scores.")
    assert found == f"    {REMEDY}"


def kept(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        query, key = (
            y.unflatten(-1, (3, 2)).transpose(1, 2) for y in (model.query(x), model.key(x))
        )
        return (query @ key.mT).softmax(-1)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("change", CHANGES)
def test_others_that_are_only_returned_are_nobody_s_trouble(
    change: Change, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model, x = Mixing(change, meets=False), noise(2, 7, 6)
    with mode(), regard.observe(model) as seen:
        model(x)
    torch.testing.assert_close(seen[0].to_dense(), kept(model, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, w: F.dropout(w, 0.3), id="dropout"),
        pytest.param(lambda _, w: torch.dropout(w, 0.3, True).clone(), id="dropout, copied"),
        pytest.param(lambda _, w: w.flatten(0, 1).view(2, 3, 7, 7), id="views"),
        pytest.param(lambda _, w: w.bfloat16().float(), id="casts"),
        pytest.param(lambda _, w: w[:, :, None].expand(2, 3, 5, 7, 7)[:, :, 1], id="expanded"),
        pytest.param(lambda _, w: w.mT.contiguous().mT, id="contiguous"),
    ],
)
def test_what_leaves_weights_as_they_are_is_kept(
    change: Change, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model, x = Mixing(change), noise(2, 7, 6)
    with mode(), regard.observe(model) as seen:
        model(x)
    torch.testing.assert_close(seen[0].to_dense(), kept(model, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(lambda w: w.mean(), id="of all"),
        pytest.param(lambda w: w.amax((1, 3))[..., None], id="of each query"),
        pytest.param(lambda w: w.sum(-1, keepdim=True).mean(1), id="of each sum"),
        pytest.param(lambda w: w.norm(2, -1, keepdim=True).mean(1), id="of each length"),
        pytest.param(lambda w: w.unflatten(-1, (1, 7)).sum((-1, -2))[:, 0, :, None], id="of parts"),
    ],
)
def test_a_number_over_the_keys_is_no_weights(number: Callable[[Tensor], Tensor]) -> None:
    class Gated(Mixing):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            output, weights = super().forward(x)
            return self.query(x * number(weights)), output

    model, x = Gated(lambda _, w: w), noise(2, 7, 6)
    with regard.observe(model) as seen:
        model(x)
    torch.testing.assert_close(seen[0].to_dense(), kept(model, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pool", [Tensor.sum, Tensor.mean, Tensor.amax], ids=["sum", "mean", "max"])
def test_one_number_over_some_of_the_keys_is_other_weights(
    pool: Callable[[Tensor, int], Tensor],
) -> None:
    class Pooled(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            weights = (self.query(x) @ self.key(x).mT).softmax(-1)
            return pool(weights.unflatten(-1, (2, 4)), -1) @ x.unflatten(1, (2, 4)).mean(2)

    reason = r"makes others of the weights after their softmax"
    model = Pooled(deep_vit)
    with pytest.raises(regard.RegardError, match=reason), regard.observe(model):
        model(noise(2, 8, 6))


def test_scores_that_are_put_back_in_another_order_are_not_lost_beside_others() -> None:
    class First(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0].flatten(-2).view_as(x)

    class Swapped(Mixing):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.query(x) @ self.key(x).mT
            scores.copy_(scores.detach().flip(1))
            return scores.softmax(-1) @ x, scores

    model = nn.Sequential(First(lambda _, w: w), Swapped(lambda _, w: w))
    reason = r"'1' cannot be kept: copy_ .* stands between"
    with pytest.raises(regard.RegardError, match=reason), regard.observe(model, strict=True):
        model(noise(2, 7, 6))
