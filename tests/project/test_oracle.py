"""The oracle and the budget are themselves right, and are seen to fail on what is wrong."""

import ast
import math
from pathlib import Path

import pytest
import torch

import oracle

SCORES = torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
ALLOWED = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
DENSE = oracle.softmax(SCORES, ALLOWED)
P = 1 / (1 + math.e)  # the softmax of (0, 1) is (P, 1 - P)
THIRD = 1 / 3
# float64 on a handful of numbers: ten roundings.
TINY = 2e-15

BY_HAND = {
    "weights": (DENSE.weights, [[P, 1 - P, 0], [THIRD, THIRD, THIRD], [0, 0, 0]]),
    "logsumexp": (oracle.logsumexp(DENSE), [math.log(1 + math.e), 3 + math.log(3), -math.inf]),
    "max-score": (oracle.max_score(DENSE), [1, 3, -math.inf]),
    "entropy": (
        oracle.entropy(DENSE),
        [-P * math.log(P) - (1 - P) * math.log(1 - P), math.log(3), 0],
    ),
    "topk-values": (oracle.topk(DENSE, 2).values, [[1 - P, P], [THIRD, THIRD], [0, 0]]),
    "topk-indices": (oracle.topk(DENSE, 3).indices, [[1, 0, -1], [0, 1, 2], [-1, -1, -1]]),
    "pool": (oracle.pool(DENSE, 2, 2), [[P, (1 - P) / 2], [THIRD / 2, THIRD / 2]]),
    "segments": (oracle.segments(DENSE, [(0, 2)], [(1, 3)]), [[(1 - P + 2 * THIRD) / 2]]),
    "diagonal": (oracle.diagonal(DENSE, -1), [THIRD, 0]),
    "product": (
        oracle.product(DENSE, torch.tensor([1.0, 2, 3], dtype=torch.float64)),
        [P + 2 * (1 - P), 2, 0],
    ),
    "transposed": (
        oracle.transposed_product(DENSE, torch.tensor([1.0, 3, 9], dtype=torch.float64)),
        [P + 1, 1 - P + 1, 1],
    ),
    "causal": (oracle.causal(2, 3), [[1, 1, 0], [1, 1, 1]]),
    "causal-top-left": (oracle.causal_top_left(2, 3), [[1, 0, 0], [1, 1, 0]]),
    "causal-more-queries": (oracle.causal(3, 2), [[0, 0], [1, 0], [1, 1]]),
    "window": (oracle.window(3, 3, 1, 0), [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
    "padding": (oracle.padding([1, 2], (2, 1, 2)), [[[1, 0]], [[1, 1]]]),
}


# A row with +inf, one with NaN, one whose NaN is masked, and an empty one; the last key is masked.
INF, NAN = math.inf, math.nan
SPECIAL = oracle.softmax(
    torch.tensor(
        [[0.0, INF, -INF], [NAN, 0.0, -INF], [0.0, 0.0, NAN], [-INF, -INF, INF]],
        dtype=torch.float64,
    ),
    torch.tensor([True, True, False]),
)
BAD_VALUE = torch.tensor([[1.0, INF], [2.0, 1.0], [NAN, NAN]], dtype=torch.float64)
BY_HAND |= {
    "special-weights": (SPECIAL.weights, [[NAN, NAN, 0], [NAN, NAN, 0], [0.5, 0.5, 0], [0, 0, 0]]),
    "special-logsumexp": (oracle.logsumexp(SPECIAL), [INF, NAN, math.log(2), -INF]),
    "special-max-score": (oracle.max_score(SPECIAL), [INF, NAN, 0, -INF]),
    "special-entropy": (oracle.entropy(SPECIAL), [NAN, NAN, math.log(2), 0]),
    "special-topk-values": (
        oracle.topk(SPECIAL, 2).values,
        [[NAN, NAN], [NAN, NAN], [0.5, 0.5], [0, 0]],
    ),
    "special-topk-indices": (
        oracle.topk(SPECIAL, 2).indices,
        [[-1, -1], [-1, -1], [0, 1], [-1, -1]],
    ),
    "special-sum-queries": (SPECIAL.weights.sum(-2), [NAN, NAN, 0]),
    "special-pool": (oracle.pool(SPECIAL, 2, 3), [[NAN, NAN, 0], [0.25, 0.25, 0]]),
    "special-product": (
        oracle.product(SPECIAL, BAD_VALUE),
        [[NAN, NAN], [NAN, NAN], [1.5, INF], [0, 0]],
    ),
    "special-transposed": (
        oracle.transposed_product(SPECIAL, torch.tensor([0.0, 0, 1, NAN], dtype=torch.float64)),
        [NAN, NAN, 0],
    ),
    "special-transposed-of-ordinary-rows": (
        oracle.transposed_product(DENSE, torch.tensor([NAN, 1.0, 1], dtype=torch.float64)),
        [NAN, NAN, THIRD],
    ),
    "special-sink": (
        oracle.softmax(SCORES, ALLOWED, torch.tensor([[NAN]])).weights,
        [[NAN, NAN, 0], [NAN, NAN, NAN], [0, 0, 0]],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_oracle_gives_what_a_hand_calculation_gives(name: str) -> None:
    found, expected = BY_HAND[name]
    by_hand = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), by_hand, atol=TINY, rtol=TINY, equal_nan=True)


def test_the_oracle_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"collections", "math", "typing", "torch"}


def test_the_oracle_repeats_grouped_heads_as_pytorch_does() -> None:
    query, key = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4)
    value = torch.randn(1, 2, 5, 4)
    output = oracle.product(oracle.attend(query, key), value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(output, expected)  # two float32 computations: default tolerance


def test_both_forms_of_the_entropy_agree() -> None:
    found = oracle.entropy_from_scores(DENSE)
    torch.testing.assert_close(found, oracle.entropy(DENSE), atol=TINY, rtol=TINY)


def test_gradients_of_the_oracle_are_finite_where_a_row_is_empty_and_weights_underflow() -> None:
    scores = torch.tensor([[0.0, 2000.0], [0.0, 0.0]], dtype=torch.float64)
    allowed = torch.tensor([[True, True], [False, False]])

    def entropies(leaf: torch.Tensor) -> torch.Tensor:
        return oracle.entropy_from_scores(oracle.softmax(leaf, allowed))

    (gradient,) = oracle.gradients(entropies, [scores])
    assert bool(gradient.isfinite().all())


EXACT = torch.tensor([1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "fact"),
    [
        pytest.param(torch.tensor([1.0, 2.2]), "error 0.2 is more than 0.1", id="error"),
        pytest.param(torch.tensor([1.0, math.nan]), "infinite or NaN", id="nan"),
        pytest.param(torch.tensor([1.0, math.inf]), "infinite or NaN", id="inf"),
        pytest.param(torch.tensor([[1.0, 2.0]]), r"\(1, 2\) instead of \(2,\)", id="shape"),
    ],
)
def test_the_comparison_fails_on(actual: torch.Tensor, fact: str) -> None:
    with pytest.raises(AssertionError, match=fact):
        oracle.assert_close(actual, EXACT, 0.1)


def test_the_comparison_fails_where_the_exact_answer_is_infinite_and_the_actual_is_not() -> None:
    with pytest.raises(AssertionError, match="infinite or NaN"):
        oracle.assert_close(torch.zeros(1), torch.tensor([-math.inf]), 1.0)


def test_the_comparison_passes_within_the_budget() -> None:
    oracle.assert_close(torch.tensor([1.0, 2.05]), EXACT, 0.1)


def test_the_budget_is_twice_the_error_of_plain_pytorch_plus_the_roundings() -> None:
    plain = torch.tensor([1.0, 2.25])
    found = oracle.allowed_error(EXACT, plain, dtype=torch.float32, scores=0.0)
    eps = torch.finfo(torch.float32).eps
    assert found == pytest.approx(2 * 0.25 + 2 * eps + 2 * eps * 2)  # python floats: exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_budget_does_not_allow_a_relative_error_of_a_hundred_roundings(
    dtype: torch.dtype,
) -> None:
    wrong = EXACT.to(dtype) * (1 + 100 * torch.finfo(dtype).eps)
    within = oracle.allowed_error(EXACT, EXACT, dtype=dtype, scores=5.0)
    with pytest.raises(AssertionError, match="is more than"):
        oracle.assert_close(wrong, EXACT, within)


def test_gradients_are_those_of_fixed_random_numbers_times_the_answer() -> None:
    (gradient,) = oracle.gradients(lambda x: 3 * x, [torch.zeros(4)], seed=7)
    expected = 3 * torch.randn(4, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(gradient, expected)  # float32 products: default tolerance


def test_the_gradient_of_an_input_that_the_answer_ignores_is_zero() -> None:
    _, ignored = oracle.gradients(lambda x, _: 2 * x, [torch.ones(2), torch.ones(3)])
    assert torch.equal(ignored, torch.zeros(3))
