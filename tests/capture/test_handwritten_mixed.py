"""However the steps of attention are mixed, it is kept as it was, or refused."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from models import noise

Step = Callable[[Tensor], Tensor]

INF = float("inf")
SOME = (
    torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1] * 5]) > 0
)
OTHERS = torch.tensor([1, 1, 0, 1, 1]) > 0
BIAS = noise(5, 5)


def last_keys(scores: Tensor) -> Tensor:
    scores[..., 3:] = -INF
    return scores


def one_head(scores: Tensor) -> Tensor:
    scores[:, 1].masked_fill_(~SOME, -INF)
    return scores


def best(scores: Tensor) -> Tensor:
    found = scores.topk(2, -1)
    return torch.full_like(scores, -INF).scatter_(-1, found.indices, found.values)


def over_sums(powers: Tensor, beside: float = 0.0) -> Tensor:
    total = powers.sum(-1, keepdim=True)
    return powers / (total + beside if beside else total)


def made_whole_in_place(weights: Tensor) -> Tensor:
    weights *= OTHERS
    weights /= weights.sum(-1, keepdim=True)
    return weights


def a_key_taken_away(weights: Tensor) -> Tensor:
    weights[..., 0] = 0
    return weights


BEFORE: dict[str, Step] = {
    "nothing": lambda s: s,
    "scale": lambda s: s * 0.3,
    "temperature": lambda s: s.div_(torch.tensor(2.0)),
    "softcap": lambda s: torch.tanh(s / 3) * 3,
    "bias": lambda s: s + BIAS.to(s.dtype),
    "less the maximum": lambda s: s - s.amax(-1, keepdim=True),
}
MASKS: dict[str, Step] = {
    "none": lambda s: s,
    "fill": lambda s: s.masked_fill(~SOME, -INF),
    "low fill": lambda s: s.masked_fill_(~SOME, -1e9),
    "where": lambda s: torch.where(SOME, s, -INF),
    "added": lambda s: s + torch.zeros(5, 5, dtype=s.dtype).masked_fill(~SOME, -INF),
    "last keys": last_keys,
    "one head": one_head,
    "best": best,
    "bounded": lambda s: s.masked_fill(~SOME, -INF).clamp(min=-1e5),
}
SOFTMAXES: dict[str, Step] = {
    "softmax": lambda s: s.softmax(-1),
    "sums": lambda s: over_sums((s - s.amax(-1, keepdim=True)).exp()),
}
OTHER_SOFTMAXES: dict[str, Step] = {
    "log_softmax": lambda s: s.log_softmax(-1).exp(),
    "logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp_(),
    "one beside": lambda s: over_sums(s.exp(), 1.0),
    "mask times powers": lambda s: over_sums(s.exp() * OTHERS, 1e-9),
}
AFTER: dict[str, Step] = {
    "nothing": lambda w: w,
    "no NaN": lambda w: w.nan_to_num(),
    "made whole": lambda w: over_sums(w * OTHERS),
    "made whole in place": made_whole_in_place,
    "normalised": lambda w: F.normalize(w.masked_fill(~OTHERS, 0), p=1, dim=-1),
    "halved": lambda w: w * 0.5,
    "a key taken away": a_key_taken_away,
}
ALL_SOFTMAXES = SOFTMAXES | OTHER_SOFTMAXES
CHANGED = ("halved", "a key taken away")


class Mixed(nn.Module):
    """Attention of some steps, which notes the weights that meet the value."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = steps
        self.query, self.key = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(self.query(x), self.key(x)) @ x

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        for step in self.steps:
            scores = step(scores)
        return scores


def one_of(steps: dict[str, Step]) -> st.SearchStrategy[str]:
    return st.sampled_from(list(steps))


@given(
    before=st.lists(one_of(BEFORE), max_size=2),
    mask=one_of(MASKS),
    softmax=one_of(ALL_SOFTMAXES),
    after=one_of(AFTER),
)
def test_mixed_steps_are_kept_as_they_were_or_refused(
    before: list[str], mask: str, softmax: str, after: str
) -> None:
    steps = [*(BEFORE[name] for name in before), MASKS[mask], ALL_SOFTMAXES[softmax], AFTER[after]]
    model, x = Mixed(steps), noise(2, 3, 5, 7)
    with torch.no_grad():
        plain = model(x)
        expected = model.weights(model.query(x).double(), model.key(x).double())
        try:
            with regard.observe(model) as seen:
                output = model(x)
        except regard.RegardError:
            return
    assert after not in CHANGED
    assert torch.equal(output, plain)
    found = seen[0].to_dense().double()
    # float32 rounds scores of 10 to 1e-6
    torch.testing.assert_close(found, expected.nan_to_num(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("mask", [name for name in MASKS if name not in ("best", "bounded")])
def test_each_mask_is_kept_with_each_softmax(mask: str, softmax: str) -> None:
    model, x = Mixed([BEFORE["scale"], MASKS[mask], SOFTMAXES[softmax]]), noise(2, 3, 5, 7)
    with torch.no_grad(), regard.observe(model) as seen:
        model(x)
    expected = model.weights(model.query(x).double(), model.key(x).double())
    torch.testing.assert_close(seen[0].to_dense().double(), expected, atol=1e-4, rtol=0)
