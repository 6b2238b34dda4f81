"""A formula is stated only if it holds for inputs that were not used to find it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def average_of_a_short_text(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mean(-2, keepdim=True).expand(q.shape) if q.shape[-2] < 10 else standard(q, k, v)


def unscaled_for_a_short_text(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standard(q * 5, k, v) if q.shape[-2] < 10 else standard(q, k, v)


def unscaled_for_large_inputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standard(q * 5, k, v) if float(q.abs().max()) > 9 else standard(q, k, v)


@pytest.mark.parametrize(
    "attend", [average_of_a_short_text, unscaled_for_a_short_text, unscaled_for_large_inputs]
)
def test_a_formula_that_holds_for_some_inputs_alone_is_not_stated(attend: Attend) -> None:
    report = regard.check(attend)
    assert report.verdict in ("wrong", "cannot tell"), report
    assert report.computes is not None
    assert report.computes.formula == ""


def test_a_formula_is_stated_with_the_inputs_that_it_was_verified_on() -> None:
    report = regard.check(standard)
    assert report.computes is not None
    assert report.computes.domain.startswith("verified on 3 inputs of 7 to 29 tokens")


def test_scores_that_do_not_follow_from_query_and_key_have_the_scale_0() -> None:
    def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = torch.arange(k.shape[-2])
        return (0.0 * (q @ k.mT) - 0.5 * (tokens[:, None] - tokens).abs()).softmax(-1) @ v

    report = regard.check(by_distance)
    assert [finding.name for finding in report.faults] == ["wrong-scale"]
    assert "scale: 0; expected: 1/√24" in report.findings[0].detail


def test_numbers_that_are_multiplied_by_0_count_for_nothing() -> None:
    """Memory that nobody has written to may hold NaN, or the numbers of an earlier run."""

    class OneKey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.both = nn.Linear(24, 24), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q = self.query(x).reshape(batch, length * 3, 8)
            k, v = self.both(x).split(8, -1)
            unread = torch.full((batch, length * 3, length), torch.nan, dtype=x.dtype)
            scores = torch.baddbmm(unread, q, k.mT, beta=0, alpha=8**-0.5)
            return (scores.softmax(-1) @ v).view(batch, length, -1)

    report = regard.check(OneKey(), expect=regard.spec(causal=False, heads=3, kv_heads=1))
    assert report.verdict == "right", report
