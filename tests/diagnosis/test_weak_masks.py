"""Masks that hide nothing are told by their numbers, whatever writes them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard

Change = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Causal, but for what is done to the scores of later keys."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.qkv, self.change = nn.Linear(16, 48), change

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.change(q @ k.mT / q.shape[-1] ** 0.5, later)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def of_padding(change: Change) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, padding_mask: Tensor) -> Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return change(scores, padding_mask[:, None]).softmax(-1) @ value

    return attention


WEAK: dict[str, tuple[Change, str, str]] = {
    "filled with 0": (
        lambda scores, hidden: scores.masked_fill(hidden, 0.0),
        "mask-fill-value",
        "Scores of masked keys are 0; only -inf hides them.",
    ),
    "a product": (
        lambda scores, hidden: scores * ~hidden,
        "mask-fill-value",
        "Scores of masked keys are 0; only -inf hides them.",
    ),
    "written by where": (
        lambda scores, hidden: torch.where(hidden, torch.tensor(-5.0, dtype=scores.dtype), scores),
        "mask-fill-value",
        "Scores of masked keys are -5; only -inf hides them.",
    ),
    "less 1": (
        lambda scores, hidden: scores - hidden.to(scores.dtype),
        "mask-added-as-numbers",
        "-1 is added to the scores of masked keys; only -inf hides them.",
    ),
    "less 20": (
        lambda scores, hidden: scores - 20 * hidden.to(scores.dtype),
        "mask-fill-value",
        "-20 is added to the scores of masked keys; only -inf hides them.",
    ),
}
WEAK_CASES = pytest.mark.parametrize(("change", "name", "says"), WEAK.values(), ids=WEAK)


@pytest.mark.sampled(1)
@WEAK_CASES
def test_a_weak_causal_mask_is_told(change: Change, name: str, says: str) -> None:
    report = regard.check(Attention(change), expect=regard.spec(causal=True, heads=4))
    assert name in {finding.name for finding in report.faults}, report


@pytest.mark.sampled(1)
@WEAK_CASES
def test_a_weak_mask_of_padding_is_told(change: Change, name: str, says: str) -> None:
    report = regard.check(of_padding(change), means={"padding_mask": "True hides"})
    [finding] = report.faults
    assert (finding.name, finding.detail) == (name, says), report
    assert finding.did is not None


def test_weights_that_are_set_to_0_are_told() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, padding_mask: Tensor) -> Tensor:
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        return weights.masked_fill(padding_mask[:, None], 0.0) @ value

    report = regard.check(attention, means={"padding_mask": "True hides"})
    assert [finding.name for finding in report.faults] == ["mask-after-softmax"], report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("low", [-1e9, -torch.inf])
def test_a_mask_that_hides_is_right(low: float) -> None:
    def change(scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden, low)

    assert regard.check(Attention(change), causal=True).ok
    assert regard.check(of_padding(change), means={"padding_mask": "True hides"}).ok
