"""Weights that are changed between their softmax and the value are no attention that is kept."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from models import noise

CAUSAL = torch.ones(9, 9).tril()
Change = Callable[[Tensor], Tensor]


class Changing(nn.Module):
    """Attention by hand, with something done to its weights."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.query, self.key, self.change = nn.Linear(16, 16), nn.Linear(16, 16), change

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT / 4
        weights = self.change(scores.softmax(-1))
        return weights @ x.to(weights.dtype)


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def check_refusal(
    change: Change, place: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model = Changing(change)
    with pytest.raises(regard.RegardError) as refusal, mode(), regard.observe(model):
        model(noise(2, 9, 16))
    first, remedy = str(refusal.value).splitlines()
    assert first.startswith(f"the attention of 'Changing' cannot be kept: {place}")
    assert first.endswith("what meets the value is no softmax of the scores.")
    assert remedy == (
        "    Mask, scale and reorder before the softmax, and multiply its weights with the value."
    )


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(lambda w: w * CAUSAL, "mul", id="masked by a product"),
        pytest.param(lambda w: w.masked_fill(CAUSAL == 0, 0.0), "masked_fill", id="filled"),
        pytest.param(lambda w: w * 0.5, "mul", id="gated"),
    ],
)
def test_changed_weights_are_refused_in_words(
    change: Change, name: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    check_refusal(change, f"{name} (", mode)


def masked_in_place(weights: Tensor) -> Tensor:
    return weights.masked_fill_(CAUSAL == 0, 0.0)


def multiplied_in_place(weights: Tensor) -> Tensor:
    weights *= CAUSAL
    return weights


def a_part_set_to_zero(weights: Tensor) -> Tensor:
    weights[..., 3] = 0
    return weights


def keys_set_to_zero(weights: Tensor) -> Tensor:
    weights[:, :, torch.tensor([1, 2])] = 0
    return weights


def halved_in_place(weights: Tensor) -> Tensor:
    return weights.mul_(0.5)


def overwritten(weights: Tensor) -> Tensor:
    weights[:, 4:] = torch.arange(9.0)
    return weights


def a_row_made_even(weights: Tensor) -> Tensor:
    weights[:, 2] = 1 / 9
    return weights


def divided_in_place(weights: Tensor) -> Tensor:
    return weights.div_(3)


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(masked_in_place, "masked_fill_", id="masked"),
        pytest.param(multiplied_in_place, "mul_", id="multiplied by a mask"),
        pytest.param(a_part_set_to_zero, "fill_", id="one key"),
        pytest.param(keys_set_to_zero, "index_put_", id="some keys"),
        pytest.param(halved_in_place, "mul_", id="halved"),
        pytest.param(divided_in_place, "div_", id="divided"),
        pytest.param(overwritten, "copy_", id="overwritten"),
        pytest.param(a_row_made_even, "fill_", id="made even"),
        pytest.param(lambda w: w * CAUSAL.expand(3, 1, 9, 9), "mul", id="repeated"),
        pytest.param(lambda w: w.half() * CAUSAL.half(), "mul", id="in half precision"),
        pytest.param(lambda w: w.half() * CAUSAL, "mul", id="and back"),
    ],
)
def test_weights_that_are_changed_in_place_are_refused_in_words(
    change: Change, name: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    check_refusal(change, f"{name} ({__file__}:", mode)


def bernoulli(weights: Tensor) -> Tensor:
    return torch.bernoulli(torch.full_like(weights, 0.7))


def drawn(weights: Tensor) -> Tensor:
    return torch.rand(weights.shape) < 0.7


def multiplied_and_divided_in_place(weights: Tensor) -> Tensor:
    weights *= bernoulli(weights)
    weights /= 0.7
    return weights


def filled_and_scaled_in_place(weights: Tensor) -> Tensor:
    return weights.masked_fill_(~drawn(weights), 0.0).mul_(1 / 0.7)


DROPOUTS: list[Change] = [
    pytest.param(lambda w: bernoulli(w) / 0.7 * w, id="scaled before"),
    pytest.param(lambda w: w * (drawn(w).float() / 0.7), id="bools as numbers"),
    pytest.param(lambda w: w.masked_fill(torch.rand_like(w) > 0.7, 0), id="filled"),
    pytest.param(lambda w: torch.where(drawn(w), w, 0.0), id="where"),
    pytest.param(lambda w: w * torch.empty_like(w).bernoulli_(0.7).div_(0.7), id="in place"),
    pytest.param(lambda w: w * torch.empty_like(w).uniform_().lt_(0.7), id="uniform"),
    pytest.param(lambda w: w * bernoulli(w), id="not scaled"),
    pytest.param(lambda w: w * (0.7 + torch.rand(2, 1, 1)).floor(), id="of a path"),
    pytest.param(lambda w: (w.half() * bernoulli(w).half()).float(), id="half precision"),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("change", DROPOUTS)
def test_dropout_that_is_written_by_hand_is_no_part_of_what_is_kept(
    change: Change, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model, x = Changing(change), noise(2, 9, 16)
    torch.manual_seed(0)
    with mode(), regard.observe(model) as seen:
        output = model(x)
    torch.manual_seed(0)
    with mode():
        assert torch.equal(output, model(x))
    torch.testing.assert_close(seen[0][:, 0].to_dense(), softmax(model, x), atol=1e-5, rtol=0)


def softmax(model: Changing, x: Tensor) -> Tensor:
    with torch.no_grad():
        return (model.query(x) @ model.key(x).mT / 4).softmax(-1)


def test_dropout_whose_mask_was_drawn_before_the_product_is_refused() -> None:
    class Early(Changing):
        def forward(self, x: Tensor) -> Tensor:
            keep = torch.bernoulli(torch.full((2, 9, 9), 0.7))
            weights = (self.query(x) @ self.key(x).mT / 4).softmax(-1)
            return (weights * keep / 0.7) @ x

    reason = r"mul .* makes others of the weights after their softmax"
    model = Early(drawn)
    with pytest.raises(regard.RegardError, match=reason), regard.observe(model) as seen:
        model(noise(2, 9, 16))
    assert list(seen) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(lambda w: w * bernoulli(w) * CAUSAL, "mul", id="and masked"),
        pytest.param(lambda w: w * bernoulli(w) * 0.3, "mul", id="and made smaller"),
        pytest.param(lambda w: w * bernoulli(w) / 0.7, "div", id="and then scaled up"),
        pytest.param(multiplied_and_divided_in_place, "div_", id="and then scaled up in place"),
        pytest.param(filled_and_scaled_in_place, "masked_fill_", id="that fills in place"),
        pytest.param(lambda w: w * torch.rand_like(w), "mul", id="each by its own number"),
        pytest.param(lambda w: w * torch.rand_like(w).sum(), "mul", id="all by one number"),
    ],
)
def test_what_chance_does_beside_dropout_is_refused(change: Change, name: str) -> None:
    check_refusal(change, f"{name} ({__file__}:", torch.no_grad)


def zeros_where_zeros_are(weights: Tensor) -> Tensor:
    """As after a fill of -inf: rows without a key would be NaN."""
    return weights.masked_fill_(weights == 0, 0.0)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(zeros_where_zeros_are, id="zeros in place"),
        pytest.param(lambda w: w.mul_(torch.ones(9, 9)), id="times one in place"),
        pytest.param(lambda w: F.dropout(w, 0.3, inplace=True), id="dropout in place"),
        pytest.param(lambda w: w.nan_to_num_(), id="no NaN in place"),
        pytest.param(lambda w: w.clamp(1e-12), id="bounds below any weight"),
        pytest.param(lambda w: w, id="nothing"),
        pytest.param(lambda w: w * torch.ones(9, 9), id="times one"),
        pytest.param(lambda w: F.dropout(w, 0.3), id="dropout"),
        pytest.param(lambda w: w.nan_to_num(), id="no NaN"),
        pytest.param(lambda w: w.double().float(), id="casts"),
    ],
)
def test_weights_that_stay_what_they_are_are_kept(
    change: Change, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model, x = Changing(change), noise(2, 9, 16)
    with mode(), regard.observe(model) as seen:
        model(x)
    with torch.no_grad():
        expected = (model.query(x) @ model.key(x).mT / 4).softmax(-1)
    torch.testing.assert_close(seen[0][:, 0].to_dense(), expected, atol=1e-5, rtol=0)
