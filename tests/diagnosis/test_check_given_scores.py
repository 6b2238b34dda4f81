"""Functions of scores and masks that are given: how they are read, and what cannot be known."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard

ONE_ROW = (
    "It is right for the scores of one query alone; of several queries it divides by one sum of "
    "them all, where each of their rows should sum to 1. It can be told where it takes one of the "
    "two only; exp(scores) / exp(scores).sum(-1, keepdim=True) is right for both."
)


def divided_by_all(scores: Tensor) -> Tensor:
    return scores.exp() / scores.exp().sum()


def divided_by_all_of_x(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum()


def of_columns(x: Tensor) -> Tensor:
    return x.softmax(-2)


def column_softmax(x: Tensor) -> Tensor:
    return x.softmax(-2)


def windowed(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    far = (places[:, None] - places).abs() > 2
    return scores.masked_fill(far, -torch.inf).softmax(-1)


def logarithms(scores: Tensor) -> Tensor:
    return scores.log_softmax(-1)


def zeros(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores)


def sums(scores: Tensor, values: Tensor) -> Tensor:
    return values.cumsum(-2)


def turned(scores: Tensor, values: Tensor) -> Tensor:
    return scores.mT.softmax(-1) @ values


def causal(scores: Tensor) -> Tensor:
    past = torch.ones_like(scores).tril()
    return scores.masked_fill(past == 0, -torch.inf).softmax(-1)


def dropping(scores: Tensor) -> Tensor:
    return torch.dropout(scores.softmax(-1), 0.5, True)


def infinite(scores: Tensor) -> Tensor:
    past = torch.ones_like(scores).tril()
    return scores.masked_fill(past == 0, torch.inf).softmax(-1)


def halved(scores: Tensor) -> Tensor:
    return scores.half().softmax(-1)


def hidden(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    return (scores if mask is None else scores.masked_fill(mask, -1e9)).softmax(-1)


def allowed(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask == 0, -1e9).softmax(-1)


def added(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask).softmax(-1)


def sharpened(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    return (scores if mask is None else scores * mask.sum()).softmax(-1)


@pytest.mark.parametrize("function", [divided_by_all, divided_by_all_of_x])
def test_a_softmax_over_all_that_may_be_of_one_row_is_no_verdict(function: Any) -> None:
    report = regard.check(function)
    assert (report.verdict, report.missing) == ("cannot tell", ONE_ROW)


def test_a_softmax_over_all_is_wrong_where_it_is_meant_to_be_causal() -> None:
    report = regard.check(divided_by_all, causal=True)
    assert {finding.name for finding in report.faults} == {"not-causal", "softmax-wrong-axis"}


def test_a_mistake_is_told_of_an_argument_that_must_be_scores_only() -> None:
    told, silent = regard.check(column_softmax), regard.check(of_columns)
    assert [finding.name for finding in told.faults] == ["softmax-wrong-axis"]
    assert (silent.verdict, silent.findings) == ("cannot tell", ())


@pytest.mark.parametrize("function", [logarithms, zeros, sums, turned])
def test_what_is_no_softmax_of_the_scores_is_never_right(function: Any) -> None:
    assert regard.check(function).verdict != "right"


def test_a_window_over_scores_is_right() -> None:
    assert regard.check(windowed).verdict == "right"


def test_a_causal_mask_is_right_whatever_is_declared() -> None:
    assert [regard.check(causal, causal=c).verdict for c in (None, True)] == ["right", "right"]


@pytest.mark.parametrize(
    ("function", "name"), [(dropping, "dropout-in-eval"), (infinite, "mask-fill-value")]
)
def test_what_no_numbers_of_one_run_show_is_told_of_scores(function: Any, name: str) -> None:
    assert [finding.name for finding in regard.check(function).faults] == [name]


def test_scores_in_half_precision_are_run_in_float32() -> None:
    report = regard.check(halved)
    assert report.ok


@pytest.mark.parametrize(
    ("function", "said"),
    [(hidden, "True or 1 of mask hides a key"), (allowed, "True or 1 of mask keeps a key")],
)
def test_the_report_says_how_a_mask_was_read(function: Any, said: str) -> None:
    report = regard.check(function)
    assert report.verdict == "right"
    assert said in str(report)


def test_numbers_that_are_added_need_no_declaration() -> None:
    assert regard.check(added).ok


@pytest.mark.full
def test_the_report_on_query_key_and_value_says_how_a_mask_was_read() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """attn_mask: True means that a key may be attended to."""
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return hidden(scores, attn_mask) @ v

    said = "True or 1 of attn_mask hides a key"
    assert said in str(regard.check(attention))  # whatever its docstring says
    report = regard.check(attention, means={"attn_mask": "True hides"})
    assert report.verdict == "right", report
    wrong = regard.check(attention, means={"attn_mask": "True keeps"})
    assert [finding.name for finding in wrong.faults] == ["mask-inverted"]


def scaled(scores: Tensor) -> Tensor:
    return (scores * 0.5).softmax(-1)


def mixed(scores: Tensor, values: Tensor) -> Tensor:
    return scores.softmax(-1) @ values


@pytest.mark.parametrize(
    ("function", "formula", "facts", "read_as"),
    [
        (causal, "softmax(scores + mask)", "causal", "scores (tokens, tokens)"),
        (scaled, "softmax(0.5·scores)", "every key", "scores (tokens, tokens)"),
        (mixed, "softmax(scores)·values", "every key", "values (tokens, "),
    ],
)
def test_what_is_said_of_given_scores_is_said_of_scores_alone(
    function: Any, formula: str, facts: str, read_as: str
) -> None:
    report = regard.check(function)
    assert report.computes is not None
    assert report.computes.formula == formula
    assert report.computes.facts[0].startswith(facts)
    assert read_as in report.read_as
    assert "query" not in f"{report.read_as} {report.computes}"


def test_a_scale_of_given_scores_is_that_of_scores() -> None:
    report = regard.check(scaled)
    (finding,) = report.findings
    assert finding.detail == "scale: 0.5; the standard: 1."
    assert report.pin == "regard.check(scaled, expect=regard.spec(causal=False, scale=0.5))"
    assert regard.check(scaled, expect=regard.spec(scale=0.5)).ok
    assert regard.check(mixed, expect=regard.spec(scale=1.0)).ok
