"""check: a softmax that meets the values as no weights of its rows is told by its numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard

Weigh = Callable[[Tensor], Tensor]


class Heads(nn.Module):
    """Attention with four heads, and weights of its own."""

    def __init__(self, weigh: Weigh, scale: float = 0.5) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.weigh, self.scale = weigh, scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * self.scale
        return self.out((self.weigh(scores) @ v).transpose(1, 2).flatten(2))


def all_at_once(scores: Tensor) -> Tensor:
    return scores.flatten(1).softmax(-1).view_as(scores)


def by_sums_of_other_rows(scores: Tensor) -> Tensor:
    powers = scores.exp()
    return powers / powers.sum(-1)[..., None, :]


AXES: dict[str, tuple[Weigh, str]] = {
    "queries": (lambda s: s.softmax(-2), "The softmax runs over the queries, and not"),
    "heads": (lambda s: s.softmax(1), "The softmax runs over the heads, and not"),
    "samples": (lambda s: s.softmax(0), "The softmax runs over the samples, and not"),
    "a sample": (all_at_once, "The softmax runs over the heads and queries and keys, and not"),
    "other rows": (by_sums_of_other_rows, "Weights are divided by the sums of other rows"),
    "causal": (
        lambda s: s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf).softmax(-2),
        "The softmax runs over the queries, and not",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axes", AXES)
def test_the_axes_of_a_softmax_are_those_that_sum_to_1(axes: str) -> None:
    weigh, says = AXES[axes]
    report = regard.check(Heads(weigh))
    assert [finding.name for finding in report.findings] == ["softmax-wrong-axis"]
    assert says in report.findings[0].detail
    assert (report.verdict, report.computes is not None) == ("wrong", True)


class ScaledBefore(Heads):
    """Queries that are scaled before they meet the keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q * self.scale, k)
        return self.out((self.weigh(scores) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("scale", "names"), [(0.5, []), (1.0, ["no-scale"])])
def test_queries_that_were_scaled_have_a_scale(scale: float, names: list[str]) -> None:
    report = regard.check(ScaledBefore(lambda scores: scores.softmax(1), scale))
    assert [finding.name for finding in report.findings] == ["softmax-wrong-axis", *names]


def test_a_mask_behind_the_softmax_leaves_less_than_1() -> None:
    report = regard.check(Heads(lambda scores: scores.softmax(-1).tril()))
    [finding] = report.findings
    assert finding.name == "mask-after-softmax"
    assert finding.attention is not None
    torch.testing.assert_close(finding.attention[0], torch.tensor([1.0, 0, 0, 0]).double())


@pytest.mark.parametrize(
    "weigh",
    [
        pytest.param(lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)), id="a sink of 1"),
        pytest.param(lambda s: s.sigmoid(), id="no softmax"),
        pytest.param(lambda s: s.softmax(-1) - 0.3 * s.mT.softmax(-1), id="a difference"),
    ],
)
def test_weights_that_may_be_meant_are_no_such_mistake(weigh: Weigh) -> None:
    report = regard.check(Heads(weigh))
    names = {finding.name for finding in report.findings}
    assert not names & {"softmax-wrong-axis", "mask-after-softmax", "weights"}


def test_a_mask_is_missed_where_causal_is_declared() -> None:
    report = regard.check(Heads(lambda scores: scores.softmax(-2)), causal=True)
    assert {finding.name for finding in report.faults} == {"softmax-wrong-axis", "not-causal"}


def test_a_scale_that_is_expected_is_no_second_mistake() -> None:
    layer = Heads(lambda scores: scores.softmax(-2), scale=1.0)
    for scale in (1.0, regard.ANY):
        report = regard.check(layer, expect=regard.spec(scale=scale))
        assert [finding.name for finding in report.findings] == ["softmax-wrong-axis"]
