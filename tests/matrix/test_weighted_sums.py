"""weighted_sum: sums of weights times given numbers, the losses of guided attention."""

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import MASKED, SCORES, SHAPES, Case, Inputs, by_name, in_turn, parametrised
from largest_tensor import LENGTH, MOST, inputs, largest
from regard.backends import sweep as blocks
from regard.matrix.weighted_sums import WeightedSum


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


A = regard.attend(normal(1, 6, 4, 5), normal(1, 2, 7, 5, seed=1), mask=regard.Causal())


def dense_weighted_sum(dense: oracle.Dense, weight: Tensor) -> Tensor:
    return (dense.weights * weight).sum(-1)


def weight_shapes(shape: torch.Size) -> dict[str, tuple[int, ...]]:
    return {
        "full": tuple(shape),
        "keys": (shape[-1],),
        "queries": (shape[-2], 1),
        "heads": (*shape[-3:-2], 1, 1),
        "one-number": (),
    }


@pytest.mark.sampled(25)
@parametrised([*SHAPES, *MASKED, *SCORES])
def test_weighted_sum_equals_its_definition(case: Case, subtests: pytest.Subtests) -> None:
    doubled = Inputs(*map(oracle.double, case.inputs)).of_scores
    matrix = case.matrix(*case.inputs.of_scores)
    in_double, plain = case.dense(*doubled), case.dense(*case.inputs.of_scores)
    for kind, shape in weight_shapes(case.inputs.shape).items():
        with subtests.test(kind):
            weight = normal(*shape)
            exact = dense_weighted_sum(in_double, weight.double())
            within = oracle.allowed_error(
                exact,
                dense_weighted_sum(plain, weight),
                dtype=torch.float32,
                scores=case.largest_score,
                unit=float(weight.abs().max()),
                roundings=oracle.SUM_ROUNDINGS,
            )
            oracle.assert_close(regard.weighted_sum(matrix, weight), exact, within)


def slope(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - 2 * kv_idx).float().sin() + 3 * h - b


def dense_slope(shape: torch.Size) -> Tensor:
    """The same numbers of a matrix of this shape; b counts through all batch axes."""
    batch = torch.arange(shape[:-3].numel()).reshape(*shape[:-3], *(1 for _ in shape[-3:]))
    head = torch.arange(shape[-3])[:, None, None] if len(shape) > 2 else 0
    q_idx, kv_idx = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
    return (
        (q_idx - 2 * kv_idx).double().sin() + 3 * head - batch.reshape(batch.shape[-len(shape) :])
    )


@in_turn(case=by_name(SHAPES), rows={"one-row": 1, "five-rows": 5})
def test_weighted_sum_with_a_callable_equals_its_definition(
    case: Case, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("BLOCK_SIZE", 1), ("MIN_ROWS", rows), ("MAX_ROWS", rows)):
        monkeypatch.setattr(blocks, constant, value)
    doubled = Inputs(*map(oracle.double, case.inputs)).of_scores
    exact = dense_weighted_sum(case.dense(*doubled), dense_slope(case.inputs.shape))
    found = regard.weighted_sum(case.matrix(*case.inputs.of_scores), slope)
    oracle.assert_close(found, exact, 1e-5 * (1 + float(exact.abs().max())))


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 1), (4,), (1, 1, 4)], ids=str)
def test_gradients_of_weighted_sum_reach_matrix_and_weight(shape: tuple[int, ...]) -> None:
    leaves = [normal(2, 3, 2), normal(1, 4, 2), normal(*shape)]

    def answer(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        return regard.weighted_sum(regard.attend(query, key, mask=regard.Causal()), weight)

    assert torch.autograd.gradcheck(answer, [leaf.double().requires_grad_() for leaf in leaves])


def test_a_row_without_keys_has_the_weighted_sum_0() -> None:
    matrix = regard.attend(normal(3, 2), normal(2, 2), mask=regard.Causal())
    found = regard.weighted_sum(matrix, torch.ones(2))
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 1.0]))


def test_weighted_sum_shares_its_pass_with_others() -> None:
    weight = normal(4, 7)
    form, entropy = A.reduce(WeightedSum(weight), regard.Entropy())
    assert torch.equal(form, regard.weighted_sum(A, weight))
    torch.testing.assert_close(entropy, A.entropy())


def test_weighted_sum_with_a_callable_never_makes_a_matrix() -> None:
    query, key, _ = inputs(gradients=True)

    def work() -> None:
        far = regard.weighted_sum(regard.attend(query, key), lambda _b, _h, i, j: (i - j) / LENGTH)
        far.sum().backward()

    assert largest(work) < MOST


def score_mod(score, b, h, q_idx, kv_idx):
    return score


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


ERRORS: dict[str, tuple[object, type[Exception], str]] = {
    "list": (
        [1.0],
        TypeError,
        "weight is a list; it must be a callable, weight(b, h, q_idx, kv_idx).\n"
        "    If you have the numbers, pass a tensor that broadcasts to the matrix.",
    ),
    "integers": (
        torch.zeros(7, dtype=torch.int64),
        TypeError,
        "weight is int64; attention needs a floating dtype.\n    Use weight.float().",
    ),
    "shape": (
        torch.zeros(5),
        ValueError,
        "weight has shape (5,); it must broadcast to (1, 6, 4, 7).\n    Its axes are aligned with "
        "the last axes of the matrix, (..., num_heads, q_len, kv_len).",
    ),
    "a-score-mod": (
        score_mod,
        TypeError,
        "weight takes (score, b, h, q_idx, kv_idx); it must take 4 scalar tensors, "
        "weight(b, h, q_idx, kv_idx).\n"
        "    If you have the numbers, pass a tensor that broadcasts to the matrix.",
    ),
    "a-mask-mod": (
        mask_mod,
        TypeError,
        "weight returns bool; it must return one floating number.\n"
        "    If you have the numbers, pass a tensor that broadcasts to the matrix.",
    ),
}


@pytest.mark.parametrize(("weight", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_weight_says_what_came_and_what_to_do(
    weight: object, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        regard.weighted_sum(A, weight)
    assert str(caught.value) == text


def test_weighted_sum_takes_only_a_matrix() -> None:
    with pytest.raises(TypeError, match="A is a Tensor; it must be an AttentionMatrix"):
        regard.weighted_sum(torch.ones(4, 7), torch.ones(7))
