"""Every question to every kind of matrix, by every backend: values, and gradients."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import (
    CASES,
    CHOSEN,
    MANY,
    MASKED,
    QUESTIONS,
    SCORES,
    SHAPES,
    Case,
    Inputs,
    Question,
    by_name,
    in_turn,
    parametrised,
)
from regard.backends import sweep as blocks
from regard.backends.choose import BACKENDS

# How large blocks are made: (numbers in a block, fewest rows, most rows).
BLOCKS = {
    "one-row": (1, 1, 1),
    "uneven-rows": (1, 3, 3),
    "two-heads": (2 * 13 * 13, 1, 13),
    "four-heads": (4 * 7 * 7, 1, 13),
    "four-of-a-group": (4 * 3 * 3, 1, 13),
}
BLOCKED = [case for case in (*SHAPES, *MASKED, *SCORES) if "square" not in case.name]
ASKED = tuple(QUESTIONS)
DIFFERENTIABLE = tuple(name for name in ASKED if not name.startswith(("top-1", "max")))


def make_blocks_small(size: tuple[int, int, int], patch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("BLOCK_SIZE", "MIN_ROWS", "MAX_ROWS"), size, strict=True):
        patch.setattr(blocks, name, value)


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def answer_dtype(question: Question, case: Case, backend: str | None) -> torch.dtype:
    """Products have the dtype of their operand, statistics at least float32."""
    if question.kind == "product":
        return case.dtype
    return torch.float64 if backend == "dense" else statistic_dtype(case.dtype)


@cache
def exact(case: Case, name: str) -> Tensor | oracle.Top:
    """The oracle's answer: float64, on the same rounded inputs."""
    dense, doubled = exact_matrix(case)
    return QUESTIONS[name].exact(dense, doubled)


@cache
def exact_matrix(case: Case) -> tuple[oracle.Dense, Inputs]:
    doubled = Inputs(*map(oracle.double, case.inputs))
    return case.dense(*doubled.of_scores), doubled


@cache
def plain_matrix(case: Case, dtype: torch.dtype) -> tuple[oracle.Dense, Inputs]:
    """What plain PyTorch has in this dtype."""
    inputs = Inputs(*(None if x is None else x.to(dtype) for x in case.inputs))
    return case.dense(*inputs.of_scores), inputs


@cache
def within(case: Case, name: str, dtype: torch.dtype) -> float:
    """The error that an answer may have, from that of plain PyTorch."""
    question = QUESTIONS[name]
    right = numbers(exact(case, name))
    as_plain = case.dtype if question.kind == "product" else statistic_dtype(case.dtype)
    plain = question.exact(*plain_matrix(case, as_plain))
    budget = question.allowed_error(right, numbers(plain), dtype=dtype, scores=case.largest_score)
    if case.dtype == torch.float32 and case.sharp <= 1:
        return min(budget, question.promised_error(right))
    return budget


def numbers(answer: Tensor | regard.Top | oracle.Top) -> Tensor:
    """The part of an answer that has an error."""
    return answer if isinstance(answer, Tensor) else answer.values


def assert_answer(
    actual: Tensor | regard.Top, case: Case, name: str, backend: str | None = None
) -> None:
    """That an answer is within the budget, of the right dtype, and names the right keys."""
    dtype = answer_dtype(QUESTIONS[name], case, backend)
    assert numbers(actual).dtype == dtype
    budget = within(case, name, dtype)
    oracle.assert_close(numbers(actual), numbers(exact(case, name)), budget)
    if not isinstance(actual, Tensor):
        assert_indices(actual, case, name, budget)


def assert_indices(actual: regard.Top, case: Case, name: str, budget: float) -> None:
    """That the keys are distinct and have these weights; near ties may change places."""
    right = exact(case, name)
    assert isinstance(right, oracle.Top)
    assert actual.indices.dtype == torch.int64
    assert torch.equal(actual.indices == -1, right.indices == -1)
    weights = exact(case, "pool-beyond")
    assert isinstance(weights, Tensor)
    many = actual.indices if actual.indices.ndim == weights.ndim else actual.indices[..., None]
    taken = weights.gather(-1, many.clamp(min=0)).masked_fill(many == -1, 0)
    oracle.assert_close(taken.reshape(right.values.shape), right.values, budget)
    in_order = many.sort(-1).values
    assert not bool(((in_order.diff(dim=-1) == 0) & (in_order[..., 1:] >= 0)).any())


def assert_answers(
    case: Case, names: Sequence[str], backend: str | None, subtests: pytest.Subtests
) -> None:
    """That each of these questions, asked together, is answered as the oracle answers it."""
    asked = [QUESTIONS[name].ask(case.inputs) for name in names]
    answers = case.matrix(*case.inputs.of_scores).reduce(*asked, backend=backend)
    for name, answer in zip(names, answers if len(names) > 1 else (answers,), strict=True):
        with subtests.test(name):
            assert_answer(answer, case, name, backend)


def taken_by_fused_kernels(case: Case) -> list[str]:
    """The questions that the fused backend answers on this matrix."""
    matrix = case.matrix(*case.inputs.of_scores)
    refusal = BACKENDS["fused"].refusal
    return [
        name
        for name, question in QUESTIONS.items()
        if refusal(matrix.source, matrix.mask, [question.ask(case.inputs)]) is None
    ]


FUSED = {case.name: names for case in CASES if (names := taken_by_fused_kernels(case))}


@pytest.mark.parametrize("backend", ["blocks", "dense"])
@parametrised(CASES)
def test_all_answers_of_one_pass_equal_the_oracle(
    case: Case, backend: str, subtests: pytest.Subtests
) -> None:
    assert_answers(case, ASKED, backend, subtests)


@in_turn(case=by_name(BLOCKED), size=BLOCKS)
def test_all_answers_from_small_blocks_equal_the_oracle(
    case: Case,
    size: tuple[int, int, int],
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_blocks_small(size, monkeypatch)
    assert_answers(case, ASKED, "blocks", subtests)


# Reductions that share a block share what it computes, so each is asked alone as well.


@in_turn(case=by_name(CHOSEN), size={"whole": None, "uneven-rows": BLOCKS["uneven-rows"]})
def test_an_answer_alone_equals_the_oracle(
    case: Case,
    size: tuple[int, int, int] | None,
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if size is not None:
        make_blocks_small(size, monkeypatch)
    for name in ASKED:
        assert_answers(case, [name], None, subtests)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["blocks", "dense"])
@parametrised(CASES)
def test_an_answer_alone_to_any_case_equals_the_oracle(
    case: Case, backend: str, subtests: pytest.Subtests
) -> None:
    for name in ASKED:
        assert_answers(case, [name], backend, subtests)


@parametrised([case for case in CASES if case.name in FUSED])
def test_an_answer_of_the_fused_backend_equals_the_oracle(
    case: Case, subtests: pytest.Subtests
) -> None:
    for name in FUSED[case.name]:
        assert_answers(case, [name], "fused", subtests)


def test_the_fused_backend_takes_the_output_of_the_usual_cases() -> None:
    for name in ("no-batch", "tokens-dim", "grouped", "plain-float32", "square-causal"):
        assert "output" in FUSED[name]


# Gradients.


def with_gradients(
    case: Case, answer: Callable[[Inputs], Tensor]
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The answer as a function of the inputs alone that gradients flow to, and those inputs."""
    given = [place for place, tensor in enumerate(case.inputs) if tensor is not None]

    def of_leaves(*leaves: Tensor) -> Tensor:
        filled: list[Tensor | None] = [None] * len(case.inputs)
        for place, leaf in zip(given, leaves, strict=True):
            filled[place] = leaf
        return answer(Inputs(*filled))  # type: ignore[arg-type]

    return of_leaves, [tensor for tensor in case.inputs if tensor is not None]


def of_regard(case: Case, names: Sequence[str], backend: str) -> Callable[[Inputs], Tensor]:
    """The numbers of all these answers, one after another."""

    def answer(inputs: Inputs) -> Tensor:
        asked = [QUESTIONS[name].ask(inputs) for name in names]
        found = case.matrix(*inputs.of_scores).reduce(*asked, backend=backend)
        return joined(found if len(names) > 1 else [found])

    return answer


def of_oracle(case: Case, names: Sequence[str]) -> Callable[[Inputs], Tensor]:
    def answer(inputs: Inputs) -> Tensor:
        dense = case.dense(*inputs.of_scores)
        questions = [QUESTIONS[name] for name in names]
        return joined([(each.differentiable or each.exact)(dense, inputs) for each in questions])

    return answer


def joined(answers: Sequence[Tensor | regard.Top | oracle.Top]) -> Tensor:
    return torch.cat([numbers(answer).flatten() for answer in answers])


def assert_gradients(case: Case, names: Sequence[str], backend: str) -> None:
    """That the gradients of a randomly weighted sum of the answers are those of the oracle."""
    function, inputs = with_gradients(case, of_regard(case, names, backend))
    definition, _ = with_gradients(case, of_oracle(case, names))
    found = oracle.gradients(function, inputs)
    right = oracle.gradients(definition, [tensor.double() for tensor in inputs])
    plain = oracle.gradients(definition, inputs)
    for actual, exactly, plainly in zip(found, right, plain, strict=True):
        assert actual.dtype == case.dtype
        # A gradient is a difference of numbers of the size of its terms: value times key or query.
        unit = float(exactly.abs().max()) + case.largest_score
        budget = oracle.allowed_error(
            exactly, plainly, dtype=case.dtype, scores=case.largest_score, unit=unit
        )
        oracle.assert_close(actual, exactly, budget)


@parametrised([*SHAPES, *MASKED, *SCORES])
def test_gradients_of_all_answers_equal_those_of_the_oracle(case: Case) -> None:
    assert_gradients(case, DIFFERENTIABLE, "blocks")


FEW_BLOCKS = {name: BLOCKS[name] for name in ("uneven-rows", "two-heads")}


@in_turn(case=by_name(SHAPES), size=FEW_BLOCKS)
def test_gradients_of_all_answers_from_small_blocks_equal_those_of_the_oracle(
    case: Case, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_blocks_small(size, monkeypatch)
    assert_gradients(case, DIFFERENTIABLE, "blocks")


def assert_gradients_alone(case: Case, subtests: pytest.Subtests) -> None:
    for name in DIFFERENTIABLE:
        with subtests.test(name):
            assert_gradients(case, [name], "blocks")


@parametrised([case for case in CHOSEN if case.dtype == torch.float32 and case not in MANY])
def test_a_gradient_of_one_answer_equals_that_of_the_oracle(
    case: Case, subtests: pytest.Subtests
) -> None:
    assert_gradients_alone(case, subtests)


@pytest.mark.full
@parametrised([*SHAPES, *MASKED, *SCORES])
def test_a_gradient_of_one_answer_to_any_case_equals_that_of_the_oracle(
    case: Case, subtests: pytest.Subtests
) -> None:
    assert_gradients_alone(case, subtests)


@pytest.mark.full
@pytest.mark.parametrize("size", FEW_BLOCKS.values(), ids=FEW_BLOCKS)
@parametrised(SHAPES)
def test_a_gradient_of_one_answer_from_small_blocks_equals_that_of_the_oracle(
    case: Case,
    size: tuple[int, int, int],
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_blocks_small(size, monkeypatch)
    assert_gradients_alone(case, subtests)


@parametrised([case for case in CASES if "output" in FUSED.get(case.name, ()) and not case.bias])
def test_a_gradient_of_the_fused_output_equals_that_of_the_oracle(case: Case) -> None:
    assert_gradients(case, ["output"], "fused")


SMALL = [
    Case("plain", "no mask", (3, 2), (4, 2), value_dim=2, dtype=torch.float64),
    Case("grouped", "grouped heads, causal, more keys", (2, 2, 2), (1, 3, 2), mask="causal",
         value_dim=1, dtype=torch.float64),
    Case("empty-rows", "rows with nothing to attend to, and a bias", (3, 2), (3, 2), bias=(3, 3),
         mask="keep-pairs", value_dim=2, dtype=torch.float64),
    Case("alibi", "slopes, and a sink beside empty rows", (3, 2), (3, 2), positions="alibi",
         sinks=True, mask="keep-pairs", value_dim=2, dtype=torch.float64),
    Case("all-steps", "bias, score_mod, softcap, mask, sink", (1, 2, 2, 2), (1, 1, 3, 2),
         positions="t5", score_mod="table", softcap=2.0, sinks=True, mask="causal", value_dim=1,
         dtype=torch.float64),
]  # fmt: skip


@in_turn(case=by_name(SMALL), size={"whole": (2**20, 32, 128), "one-row": BLOCKS["one-row"]})
def test_gradients_of_all_answers_equal_finite_differences(
    case: Case, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_blocks_small(size, monkeypatch)
    function, inputs = with_gradients(case, of_regard(case, DIFFERENTIABLE, "blocks"))
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    # Infinite answers of empty rows have no differences; gradcheck's own tolerances otherwise.
    # The fast mode compares along one random direction instead of along each axis.
    assert torch.autograd.gradcheck(lambda *x: oracle.finite(function(*x)), leaves, fast_mode=True)


@pytest.mark.full
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@parametrised(SMALL)
def test_a_gradient_of_one_answer_equals_finite_differences(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_blocks_small(BLOCKS["one-row"], monkeypatch)
    function, inputs = with_gradients(case, of_regard(case, [name], "blocks"))
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(lambda *x: oracle.finite(function(*x)), leaves)
