"""NaN, infinity and rows without keys give what ``docs/numerics.md`` says, by every backend."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from cases import QUESTIONS, Inputs
from regard.backends import sweep as blocks
from regard.backends.cpu import cpu_backend
from special_numbers import ASKED, MASKS, REDUCTIONS, differing

full = pytest.mark.full
every_mask = pytest.mark.parametrize("mask", MASKS)
few_masks = pytest.mark.parametrize(
    "mask", [name if name == "keep" else pytest.param(name, marks=full) for name in MASKS]
)


# The table of docs/numerics.md: questions x masks x kinds of bad numbers, by each backend.


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of eight rows of one head."""
    for name, value in {"BLOCK_SIZE": 1, "MIN_ROWS": 8, "MAX_ROWS": 8}.items():
        monkeypatch.setattr(blocks, name, value)


@pytest.mark.sampled(3)
@every_mask
def test_the_default_backend_follows_the_table(mask: str) -> None:
    assert differing(ASKED, mask, None) == []


@few_masks
def test_a_sink_changes_nothing_in_the_table(mask: str) -> None:
    names = [name for name in ASKED if "js" not in name]  # its definition knows no sinks
    assert differing(names, mask, None, sinks=True) == []


@few_masks
def test_finite_scores_follow_the_table(mask: str) -> None:
    assert differing(ASKED, mask, None, spoilt=False) == []


@every_mask
def test_the_fused_backend_follows_the_table(mask: str) -> None:
    assert differing(["output"], mask, "sdpa", spoilt=False) == []


@few_masks
def test_the_dense_backend_follows_the_table(mask: str) -> None:
    assert differing(REDUCTIONS, mask, "dense") == []


@few_masks
def test_blocks_of_few_rows_follow_the_table(mask: str, small_blocks: None) -> None:
    assert differing(REDUCTIONS, mask, "sweep") == []


@pytest.mark.sampled(3)
@every_mask
def test_the_compiled_kernels_follow_the_table(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "_LEAST", 0)  # they leave small matrices to others
    assert differing(ASKED, mask, None) == []


# What the table leaves open.


def test_a_row_with_infinity_has_no_largest_weight() -> None:
    A = regard.AttentionMatrix.from_scores(torch.tensor([[0.0, math.inf], [0.0, 1.0]]))
    found = A.max()
    assert found.values[0].isnan()
    assert found.indices.tolist() == [-1, 1]
    assert A.topk(2).values[0].isnan().all()
    assert A.topk(2).indices[0].tolist() == [-1, -1]


def test_logsumexp_of_infinity_is_that_of_pytorch() -> None:
    scores = torch.tensor([[0.0, math.inf], [math.nan, math.inf], [0.0, 1.0]])
    found = regard.AttentionMatrix.from_scores(scores).logsumexp()
    torch.testing.assert_close(found, scores.logsumexp(-1), equal_nan=True)


@pytest.mark.parametrize("length", [4, 21])  # kernels treat the keys after a whole vector apart
@pytest.mark.parametrize("name", QUESTIONS)
def test_infinity_in_a_masked_key_changes_nothing(name: str, length: int) -> None:
    x = inputs(length)
    spoilt = x.key.clone()
    spoilt[0, 2] = math.inf
    mask = regard.Padding(2)
    found, right = (
        regard.attend(x.query, key, mask=mask).reduce(QUESTIONS[name].ask(x))
        for key in (spoilt, x.key)
    )
    # Another backend may answer, in another order of the sums: some float32 roundings.
    torch.testing.assert_close(found, right, atol=2e-6, rtol=2e-6)


def test_weights_of_nan_stay_in_their_row() -> None:
    weights = torch.tensor([[math.nan, math.nan], [0.5, 0.5]])
    entropy = regard.AttentionMatrix.from_weights(weights).entropy()
    torch.testing.assert_close(entropy, torch.tensor([math.nan, math.log(2)]), equal_nan=True)


def test_gradients_of_rows_without_nan_are_numbers() -> None:
    x = inputs(21)
    query = x.query.clone()
    query[0, 1] = math.nan
    query.requires_grad_()
    entropy = regard.attend(query, x.key).entropy()
    (gradient,) = torch.autograd.grad(entropy[:, 2:].sum(), query)
    assert bool(gradient[:, 2:].isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_value_that_is_masked_leaves_gradients_alone(bad: float) -> None:
    x = inputs(21)
    query, key, value = (tensor.clone() for tensor in (x.query, x.key, x.value))
    value[:, 9] = bad
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = regard.attend(query, key, mask=regard.Causal()) @ value
    found = torch.autograd.grad(output[:, :9].sum(), leaves)
    right = torch.autograd.grad(
        (regard.attend(query[:, :9], key[:, :9], mask=regard.Causal()) @ value[:, :9]).sum(), leaves
    )
    for mine, exact in zip(found, right, strict=True):
        torch.testing.assert_close(mine, exact)


def test_steps_follow_the_table() -> None:
    scores = torch.tensor([[0.0, math.inf, -math.inf], [math.nan, 1.0, -math.inf]])
    value = torch.tensor([1.0, 2.0, math.nan])
    for A in (
        regard.AttentionMatrix.from_scores(scores),
        regard.AttentionMatrix.from_scores(scores, mask=torch.tensor([True, True, False])),
    ):
        for query in (0, 1):
            weights = regard.steps(A, query, value=value).table["weight"]
            torch.testing.assert_close(
                torch.tensor(weights[:3]), A[query], rtol=0, atol=0, equal_nan=True
            )
    A = regard.AttentionMatrix.from_scores(torch.tensor([[0.0, 0.0, -math.inf]]))
    output = regard.steps(A, 0, value=value).output
    assert output is not None
    assert output.tolist() == [1.5]


def inputs(length: int) -> Inputs:
    generator = torch.Generator().manual_seed(length)
    query, key, value, operand = (torch.randn(2, length, 4, generator=generator) for _ in range(4))
    return Inputs(query, key, None, value, operand)


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
        pytest.param(lambda m: m.scores.amax(-1), torch.full((3,), -math.inf), id="max-score"),
        pytest.param(lambda m: m.scores.max(), torch.tensor(-math.inf), id="max-score-of-all"),
        pytest.param(lambda m: m.scores[...], torch.full((3, 3), -math.inf), id="scores"),
    ],
)
def test_a_row_with_nothing_to_attend_to_has_one_convention(
    ask: Callable[[regard.AttentionMatrix], Tensor], expected: Tensor
) -> None:
    assert torch.equal(ask(EMPTY), expected)


@pytest.mark.parametrize("name", ["logsumexp", "max-score", "entropy", "sum-queries", "output"])
def test_gradients_of_rows_with_nothing_to_attend_to_are_0(name: str) -> None:
    x = inputs(4)
    query = x.query.clone().requires_grad_()
    found = regard.attend(query, x.key, mask=regard.Padding(0)).reduce(QUESTIONS[name].ask(x))
    torch.where(found.isfinite(), found, 0).sum().backward()
    assert query.grad is not None
    assert torch.equal(query.grad, torch.zeros_like(query))
