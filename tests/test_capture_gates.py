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
    assert remedy == "    Mask the scores before the softmax, with -inf."


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
        pytest.param(lambda w: w * CAUSAL.expand(3, 1, 9, 9), "mul", id="repeated"),
        pytest.param(lambda w: w.half() * CAUSAL.half(), "mul", id="in half precision"),
        pytest.param(lambda w: w.half() * CAUSAL, "mul", id="and back"),
    ],
)
def test_weights_that_are_changed_in_place_are_refused_in_words(
    change: Change, name: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    check_refusal(change, f"{name} ({__file__}:", mode)


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
        pytest.param(lambda w: w.mul_((torch.arange(9) > 2)[:, None]), id="rows in place"),
        pytest.param(lambda w: w.clamp(1e-12), id="bounds below any weight"),
        pytest.param(lambda w: w, id="nothing"),
        pytest.param(lambda w: w * torch.ones(9, 9), id="times one"),
        pytest.param(lambda w: F.dropout(w, 0.3), id="dropout"),
        pytest.param(lambda w: w.nan_to_num(), id="no NaN"),
        pytest.param(lambda w: w.double().float(), id="casts"),
        pytest.param(lambda w: w * (torch.arange(9) > 2)[:, None], id="rows of zeros"),
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
