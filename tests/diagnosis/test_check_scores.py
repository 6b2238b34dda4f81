"""Scores that are more than query times key: what is explained is right, else no verdict."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from cases import in_turn

Change = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Right but for what is done to its scores."""

    def __init__(self, change: Change, num_heads: int = 4) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.change, self.num_heads = change, num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        weights = self.change(scores).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def of_qkv(change: Change) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    return attention


def unbatched(change: Change) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(torch.mm(q, k.t()) * q.shape[-1] ** -0.5).softmax(-1) @ v

    return attention


def squared(scores: Tensor) -> Tensor:
    return scores**2


def clamped(scores: Tensor) -> Tensor:
    return scores.clamp(-0.1, 0.1)


def top_three(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], -torch.inf)


def gated(scores: Tensor) -> Tensor:
    return scores + scores.mT


def capped(scores: Tensor) -> Tensor:
    return 2 * (scores / 2).tanh()


def biased(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    return scores - 0.3 * (places[:, None] - places).abs()


def capped_and_biased(scores: Tensor) -> Tensor:
    return biased(capped(scores))


def windowed(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    far = (places[:, None] - places).abs() > 2
    return scores.masked_fill(far, -1e9)


FORMS = {"module": Attention, "function": of_qkv, "without a batch": unbatched}
FUNCTIONS = {
    "relu": torch.relu,
    "abs": torch.abs,
    "pow": squared,
    "clamp": clamped,
    "sin": torch.sin,
    "sigmoid": torch.sigmoid,
    "topk": top_three,
}
EXPLAINED = {
    "capped": capped,
    "biased": biased,
    "capped and biased": capped_and_biased,
    "windowed": windowed,
}


@pytest.mark.sampled(3)
@in_turn(name=list(FUNCTIONS), form=list(FORMS))
def test_a_function_of_the_scores_is_no_verdict(name: str, form: str) -> None:
    report = regard.check(FORMS[form](FUNCTIONS[name]))
    if name == "sigmoid":  # 1/2 + tanh(s/2)/2, so that the softmax is one of capped scores
        assert report.verdict in ("different", "cannot tell"), str(report)
        return
    assert (report.verdict, report.faults) == ("cannot tell", ()), str(report)
    reasons = (
        "the scores are no multiple of query · key",
        "which keys a query sees follows no rule",
    )
    assert any(reason in report.missing for reason in reasons), report


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_scores_below_zero_are_wrong(form: str) -> None:
    report = regard.check(FORMS[form](torch.neg))
    assert [finding.name for finding in report.faults] == ["wrong-scale"]


def test_what_is_added_and_changes_with_the_input_is_no_verdict() -> None:
    report = regard.check(of_qkv(gated))
    assert report.verdict == "cannot tell"
    assert "the scores are no multiple of query · key, plus numbers" in report.missing


@pytest.mark.sampled(1)
@in_turn(name=list(EXPLAINED), form=list(FORMS))
def test_a_cap_a_bias_and_a_mask_of_places_are_right(name: str, form: str) -> None:
    report = regard.check(FORMS[form](EXPLAINED[name]))
    assert report.verdict == "right", str(report)


def test_a_wrong_scale_under_a_bias_is_told_with_its_number() -> None:
    report = regard.check(of_qkv(lambda scores: biased(3 * scores)))
    assert [finding.name for finding in report.differences] == ["wrong-scale"]
    assert report.differences[0].detail.startswith("scale: 0.6124; the standard: ")


def test_a_softmax_over_queries_under_a_bias_is_named() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return biased(q @ k.mT * q.shape[-1] ** -0.5).softmax(-2) @ v

    report = regard.check(attention)
    assert [finding.name for finding in report.faults] == ["softmax-wrong-axis"]
    assert report.faults[0].code.startswith("return biased(")


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_weights_that_are_scaled_behind_the_softmax_have_no_name(factor: float) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        weights = weights * factor
        return weights @ v

    report = regard.check(attention)
    assert [finding.name for finding in report.faults] == ["weights"]
    assert f"The weights of each query sum to {factor:.4g}; they should sum to 1." in str(report)
