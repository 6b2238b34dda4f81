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
        return self.change(scores.softmax(-1)) @ x


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


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
    model = Changing(change)
    with pytest.raises(regard.RegardError) as refusal, mode(), regard.observe(model):
        model(noise(2, 9, 16))
    first, remedy = str(refusal.value).splitlines()
    assert first.startswith(f"the attention of 'Changing' cannot be kept: {name} (")
    assert first.endswith("what meets the value is no softmax of the scores.")
    assert remedy == "    Mask the scores before the softmax, with -inf."


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    "change",
    [
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
