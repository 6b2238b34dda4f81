"""NaN and infinity: they stay in the rows that saw them, and nothing hangs."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from cases import QUESTIONS, Inputs

# 21 keys: PyTorch's CPU kernels treat the keys after the last whole vector in their own way.
LENGTHS = (4, 21)
BAD_QUERY, BAD_KEY = 1, 2
BY_ROW = ("logsumexp", "entropy", "top-1", "top-3", "top-all", "max", "sum-keys", "output")
MASKS: dict[str, tuple[regard.Mask | None, Callable[[int], Tensor]]] = {
    "no-mask": (None, lambda n: torch.ones(n, dtype=torch.bool)),
    "causal": (regard.Causal(), lambda n: torch.arange(n) >= BAD_KEY),
    "window": (
        regard.SlidingWindow(1, 0),
        lambda n: (torch.arange(n) >= BAD_KEY) & (torch.arange(n) <= BAD_KEY + 1),
    ),
    "padding": (regard.Padding(BAD_KEY), lambda n: torch.zeros(n, dtype=torch.bool)),
}
kinds = pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
lengths = pytest.mark.parametrize("length", LENGTHS)
by_row = pytest.mark.parametrize("name", BY_ROW)
by_mask = pytest.mark.parametrize("mask", MASKS)


def inputs(length: int) -> Inputs:
    generator = torch.Generator().manual_seed(length)
    query, key, value, operand = (torch.randn(2, length, 4, generator=generator) for _ in range(4))
    return Inputs(query, key, None, value, operand)


def spoilt(tensor: Tensor, row: int, bad: float) -> Tensor:
    """The tensor with one bad token in its first head."""
    changed = tensor.clone()
    changed[0, row] = bad
    return changed


def answer(x: Inputs, mask: regard.Mask | None, name: str) -> Tensor:
    matrix = regard.attend(x.query, x.key, mask=mask)
    # The product as people write it, so that the fastest backend is the one that is tested.
    found = matrix @ x.value if name == "output" else matrix.reduce(QUESTIONS[name].ask(x))
    return found if isinstance(found, Tensor) else found.values


def rows_with_nan(found: Tensor) -> Tensor:
    """Which rows of which head hold NaN, (heads, rows)."""
    return found.isnan().reshape(*found.shape[:2], -1).any(-1)


@by_row
@by_mask
@lengths
def test_nan_in_a_query_gives_nan_in_its_own_row_only(name: str, mask: str, length: int) -> None:
    x = inputs(length)
    x = x._replace(query=spoilt(x.query, BAD_QUERY, math.nan))
    expected = torch.zeros(2, length, dtype=torch.bool)
    expected[0, BAD_QUERY] = True
    assert torch.equal(rows_with_nan(answer(x, MASKS[mask][0], name)), expected)


@by_row
@by_mask
@lengths
def test_nan_in_a_key_gives_nan_in_the_rows_that_may_attend_to_it_only(
    name: str, mask: str, length: int
) -> None:
    x = inputs(length)
    x = x._replace(key=spoilt(x.key, BAD_KEY, math.nan))
    expected = torch.zeros(2, length, dtype=torch.bool)
    expected[0] = MASKS[mask][1](length)
    assert torch.equal(rows_with_nan(answer(x, MASKS[mask][0], name)), expected)


@by_row
@by_mask
@lengths
@kinds
def test_the_other_rows_keep_their_answers(name: str, mask: str, length: int, bad: float) -> None:
    x = inputs(length)
    whole = answer(x, MASKS[mask][0], name)
    found = answer(x._replace(query=spoilt(x.query, BAD_QUERY, bad)), MASKS[mask][0], name)
    others = torch.ones(2, length, dtype=torch.bool)
    others[0, BAD_QUERY] = False
    # Another backend may answer, in another order of the sums: some float32 roundings.
    torch.testing.assert_close(found[others], whole[others], atol=2e-6, rtol=2e-6)


@by_row
@lengths
def test_infinity_in_a_masked_key_changes_nothing(name: str, length: int) -> None:
    x = inputs(length)
    mask = MASKS["padding"][0]
    found = answer(x._replace(key=spoilt(x.key, BAD_KEY, math.inf)), mask, name)
    # Another backend may answer, in another order of the sums: some float32 roundings.
    torch.testing.assert_close(found, answer(x, mask, name), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["pool-3x4", "segments", "sum-queries"])
def test_nan_in_one_head_leaves_the_other_heads_alone(name: str) -> None:
    x = inputs(21)
    x = x._replace(query=spoilt(x.query, BAD_QUERY, math.nan))
    assert answer(x, None, name).isnan().flatten(1).any(-1).tolist() == [True, False]


@lengths
def test_the_keys_of_a_row_of_nan_are_keys_of_the_matrix(length: int) -> None:
    x = inputs(length)
    matrix = regard.attend(spoilt(x.query, BAD_QUERY, math.nan), x.key)
    indices = matrix.topk(2).indices[0, BAD_QUERY]
    assert bool(((indices >= 0) & (indices < length)).all())


def test_scores_of_nan_are_nan() -> None:
    x = inputs(4)
    scores = regard.attend(spoilt(x.query, BAD_QUERY, math.nan), x.key).scores[0, BAD_QUERY]
    assert bool(scores.isnan().all())


def test_weights_of_nan_stay_in_their_row() -> None:
    weights = torch.tensor([[math.nan, math.nan], [0.5, 0.5]])
    entropy = regard.AttentionMatrix.from_weights(weights).entropy()
    torch.testing.assert_close(entropy, torch.tensor([math.nan, math.log(2)]), equal_nan=True)


def test_a_score_of_infinity_gives_nan_in_its_row_as_a_softmax_does() -> None:
    scores = torch.tensor([[math.inf, 0.0], [0.0, 0.0]])
    found = regard.AttentionMatrix.from_scores(scores).to_dense()
    assert torch.equal(found.isnan(), scores.softmax(-1).isnan())


def test_gradients_of_rows_without_nan_are_numbers() -> None:
    x = inputs(21)
    query = spoilt(x.query, BAD_QUERY, math.nan).requires_grad_()
    entropy = regard.attend(query, x.key).entropy()
    (gradient,) = torch.autograd.grad(entropy[:, BAD_QUERY + 1 :].sum(), query)
    assert bool(gradient[:, BAD_QUERY + 1 :].isfinite().all())


# Rows with nothing to attend to.


EMPTY = regard.attend(torch.randn(3, 2), torch.randn(3, 2), mask=torch.tensor([False] * 3))


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        pytest.param(lambda m: m.to_dense(), torch.zeros(3, 3), id="weights"),
        pytest.param(lambda m: m @ torch.ones(3, 2), torch.zeros(3, 2), id="output"),
        pytest.param(lambda m: m.T @ torch.ones(3, 2), torch.zeros(3, 2), id="transposed"),
        pytest.param(lambda m: m.logsumexp(), torch.full((3,), -math.inf), id="logsumexp"),
        pytest.param(lambda m: m.entropy(), torch.zeros(3), id="entropy"),
        pytest.param(lambda m: m.topk(2).indices, torch.full((3, 2), -1), id="topk-indices"),
        pytest.param(lambda m: m.topk(2).values, torch.zeros(3, 2), id="topk-values"),
        pytest.param(lambda m: m.max().indices, torch.full((3,), -1), id="max-indices"),
        pytest.param(lambda m: m.sum(-1), torch.zeros(3), id="sum-keys"),
        pytest.param(lambda m: m.sum(-2), torch.zeros(3), id="sum-queries"),
        pytest.param(lambda m: m.pool(2, 2), torch.zeros(2, 2), id="pool"),
        pytest.param(lambda m: m.scores[...], torch.full((3, 3), -math.inf), id="scores"),
    ],
)
def test_a_row_with_nothing_to_attend_to_has_one_convention(
    ask: Callable[[regard.AttentionMatrix], Tensor], expected: Tensor
) -> None:
    assert torch.equal(ask(EMPTY), expected)


@pytest.mark.parametrize("name", ["logsumexp", "entropy", "sum-queries", "output"])
def test_gradients_of_rows_with_nothing_to_attend_to_are_0(name: str) -> None:
    x = inputs(4)
    query = x.query.clone().requires_grad_()
    found = answer(x._replace(query=query), regard.Padding(0), name)
    torch.where(found.isfinite(), found, 0).sum().backward()
    assert query.grad is not None
    assert torch.equal(query.grad, torch.zeros_like(query))
