"""A formula is stated only if it holds for inputs that were not used to find it."""

from collections.abc import Callable

import pytest
from torch import Tensor

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
