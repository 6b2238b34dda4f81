"""Attention of a single query, as courses introduce it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_product(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    weights = torch.softmax(keys @ query / query.shape[-1] ** 0.5, dim=0)
    return weights @ values


def by_sum(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = (keys * query).sum(-1) / query.shape[-1] ** 0.5
    return torch.softmax(scores, dim=-1) @ values


def unscaled(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(keys @ query, dim=0) @ values


def without_a_softmax(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return keys @ query @ values


EXAMPLE = (torch.randn(8), torch.randn(5, 8), torch.randn(5, 8))


@pytest.mark.parametrize("attend", [by_product, by_sum])
def test_attention_of_one_query_is_right_with_an_example(attend: Attend) -> None:
    report = regard.check(attend, args=EXAMPLE)
    assert report.verdict == "right", report
    assert report.notes == ("It takes one query at a time.",)


def test_a_width_that_one_query_writes_down_is_that_of_its_example() -> None:
    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.softmax((keys * query).sum(-1) / 8**0.5, dim=-1) @ values

    assert regard.check(attend, args=EXAMPLE, expect=regard.spec()).verdict == "right"


def test_attention_of_one_query_is_right_without_an_example() -> None:
    assert regard.check(by_product).verdict == "right"


def test_a_scale_that_is_missing_is_told_and_wrong_if_the_standard_is_expected() -> None:
    assert [f.name for f in regard.check(unscaled).differences] == ["no-scale"]
    assert regard.check(unscaled, expect=regard.spec()).verdict == "wrong"
    assert regard.check(unscaled, expect=regard.spec(scale=1.0)).verdict == "right"


def test_one_query_without_a_softmax_is_never_right() -> None:
    assert regard.check(without_a_softmax).verdict in ("wrong", "cannot tell")
    assert regard.check(without_a_softmax, args=EXAMPLE).verdict in ("wrong", "cannot tell")
