"""Attention of a single query, as courses introduce it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.full
def test_attention_of_one_query_is_right_without_an_example() -> None:
    assert regard.check(by_product).verdict == "right"


@pytest.mark.full
def test_a_scale_that_is_missing_is_told_and_wrong_if_the_standard_is_expected() -> None:
    assert [f.name for f in regard.check(unscaled).differences] == ["no-scale"]
    assert regard.check(unscaled, expect=regard.spec()).verdict == "wrong"
    assert regard.check(unscaled, expect=regard.spec(scale=1.0)).verdict == "right"


def test_one_query_without_a_softmax_is_never_right() -> None:
    assert regard.check(without_a_softmax).verdict in ("wrong", "cannot tell")
    assert regard.check(without_a_softmax, args=EXAMPLE).verdict in ("wrong", "cannot tell")


def of_each_sample(state: Tensor, encoder_states: Tensor) -> Tensor:
    """The context of one state of a decoder for each sample."""
    scores = torch.bmm(encoder_states, state[..., None])[..., 0] / state.shape[-1] ** 0.5
    return torch.bmm(scores.softmax(-1)[:, None], encoder_states)[:, 0]


def of_all_samples(state: Tensor, encoder_states: Tensor) -> Tensor:
    scores = torch.bmm(encoder_states, state[..., None])[..., 0] / state.shape[-1] ** 0.5
    return torch.bmm(scores.softmax(0)[:, None], encoder_states)[:, 0]


class Luong(nn.Module):
    """A general score for one state of a decoder, and the weights behind the context."""

    def __init__(self, dim: int = 16, *, keeps: bool = True) -> None:
        super().__init__()
        self.key, self.keeps = nn.Linear(dim, dim, bias=False), keeps

    def forward(
        self, hidden: Tensor, encoder_outputs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("bd,btd->bt", hidden, self.key(encoder_outputs)) / 4
        if mask is not None:
            scores = scores.masked_fill(mask ^ self.keeps, -torch.inf)
        weights = scores.softmax(-1)
        return torch.einsum("bt,btd->bd", weights, encoder_outputs), weights


BATCH = (torch.randn(2, 8), torch.randn(2, 7, 8))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("args", [None, BATCH])
def test_one_query_of_each_sample_is_no_exchange_of_heads_and_tokens(args: object) -> None:
    report = regard.check(of_each_sample, args=args, expect=regard.spec())  # pyright: ignore
    assert report.verdict == "right", report
    assert report.notes == ("It takes one query at a time.",)


@pytest.mark.parametrize("args", [None, BATCH])
def test_a_softmax_over_the_samples_of_one_query_is_told(args: object) -> None:
    names = [finding.name for finding in regard.check(of_all_samples, args=args).faults]  # pyright: ignore
    assert names == ["softmax-wrong-axis"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("keeps", "verdict"), [(True, "right"), (False, "wrong")])
def test_a_module_of_one_query_is_read_with_its_mask(keeps: bool, verdict: str) -> None:
    expected = regard.spec(padding={"mask": "True keeps"})
    report = regard.check(Luong(keeps=keeps), expect=expected)
    assert report.verdict == verdict, report
    assert keeps or [finding.name for finding in report.faults] == ["mask-inverted"]


@pytest.mark.full
def test_code_of_one_query_is_called_with_many_before_square_inputs_are_tried() -> None:
    lengths: list[tuple[int, ...]] = []

    def context(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lengths.append(tuple(query.shape))
        return (keys @ query / len(query) ** 0.5).softmax(0) @ values

    assert regard.check(context, expect=regard.spec()).verdict == "right"
    assert not [shape for shape in lengths if shape[-2:-1] == shape[-1:]]
