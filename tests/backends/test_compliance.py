"""Every question to every kind of matrix, by every backend: values, and gradients."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import CASES, MASKED, QUESTIONS, SCORES, SHAPES, Case, Inputs, Question, parametrised
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
DIFFERENTIABLE = [name for name in QUESTIONS if not name.startswith(("top-1", "max"))]
questions = pytest.mark.parametrize("name", QUESTIONS)


@pytest.fixture
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks small; parametrised indirectly with a key of BLOCKS."""
    names = ("BLOCK_SIZE", "MIN_ROWS", "MAX_ROWS")
    for name, value in zip(names, BLOCKS[request.param], strict=True):
        monkeypatch.setattr(blocks, name, value)


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def answer_dtype(question: Question, case: Case, backend: str) -> torch.dtype:
    """Products have the dtype of their operand, statistics at least float32."""
    if question.kind == "product":
        return case.dtype
    return torch.float64 if backend == "dense" else statistic_dtype(case.dtype)


@cache
def exact(case: Case, name: str) -> Tensor | oracle.Top:
    """The oracle's answer: float64, on the same rounded inputs."""
    doubled = Inputs(*map(oracle.double, case.inputs))
    return QUESTIONS[name].exact(case.dense(*doubled.of_scores), doubled)


@cache
def within(case: Case, name: str, dtype: torch.dtype) -> float:
    """The error that an answer may have, from that of plain PyTorch."""
    question = QUESTIONS[name]
    as_plain = case.dtype if question.kind == "product" else statistic_dtype(case.dtype)
    inputs = Inputs(*(None if x is None else x.to(as_plain) for x in case.inputs))
    plain = question.exact(case.dense(*inputs.of_scores), inputs)
    return question.allowed_error(
        numbers(exact(case, name)), numbers(plain), dtype=dtype, scores=case.largest_score
    )


def numbers(answer: Tensor | regard.Top | oracle.Top) -> Tensor:
    """The part of an answer that has an error."""
    return answer if isinstance(answer, Tensor) else answer.values


def assert_answer(actual: Tensor | regard.Top, case: Case, name: str, backend: str) -> None:
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


@questions
@pytest.mark.parametrize("backend", ["blocks", "dense"])
@parametrised(CASES)
def test_an_answer_equals_the_oracle(case: Case, name: str, backend: str) -> None:
    inputs = case.inputs
    matrix = case.matrix(*inputs.of_scores)
    assert_answer(matrix.reduce(QUESTIONS[name].ask(inputs), backend=backend), case, name, backend)


@pytest.mark.parametrize("block_size", BLOCKS, indirect=True)
@parametrised(BLOCKED)
def test_the_answers_from_small_blocks_equal_the_oracle(case: Case, block_size: None) -> None:
    inputs = case.inputs
    asked = [question.ask(inputs) for question in QUESTIONS.values()]
    answers = case.matrix(*inputs.of_scores).reduce(*asked, backend="blocks")
    for name, answer in zip(QUESTIONS, answers, strict=True):
        assert_answer(answer, case, name, "blocks")


FUSED = {
    (case.name, name): case
    for case in CASES
    for name, question in QUESTIONS.items()
    if BACKENDS["fused"].refusal(
        (matrix := case.matrix(*case.inputs.of_scores)).source,
        matrix.mask,
        [question.ask(case.inputs)],
    )
    is None
}


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case.name}-{name}") for (_, name), case in FUSED.items()],
)
def test_an_answer_of_the_fused_backend_equals_the_oracle(case: Case, name: str) -> None:
    inputs = case.inputs
    matrix = case.matrix(*inputs.of_scores)
    assert_answer(matrix.reduce(QUESTIONS[name].ask(inputs), backend="fused"), case, name, "fused")


def test_the_fused_backend_takes_the_output_of_the_usual_cases() -> None:
    usual = {"no-batch", "tokens-dim", "grouped", "plain-float32", "square-causal"}
    assert {(name, "output") for name in usual} <= set(FUSED)


@parametrised(CASES)
def test_all_questions_in_one_pass_give_what_each_gives_alone(case: Case) -> None:
    inputs = case.inputs
    matrix = case.matrix(*inputs.of_scores)
    asked = [question.ask(inputs) for question in QUESTIONS.values()]
    together = matrix.reduce(*asked)
    alone = [matrix.reduce(reduction, backend="blocks") for reduction in asked]
    flat = [part for answers in (together, alone) for part in flatten(answers)]
    half = len(flat) // 2
    pairs = zip(flat[:half], flat[half:], strict=True)
    # The same arithmetic on the same blocks, but rows that a window leaves out are swept too.
    assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-6) for a, b in pairs)


def flatten(answers: tuple[Tensor | regard.Top, ...] | list[Tensor | regard.Top]) -> list[Tensor]:
    return [
        part for answer in answers for part in ((answer,) if isinstance(answer, Tensor) else answer)
    ]


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


def of_regard(case: Case, name: str, backend: str) -> Callable[[Inputs], Tensor]:
    def answer(inputs: Inputs) -> Tensor:
        matrix = case.matrix(*inputs.of_scores)
        return numbers(matrix.reduce(QUESTIONS[name].ask(inputs), backend=backend))

    return answer


def of_oracle(case: Case, name: str) -> Callable[[Inputs], Tensor]:
    question = QUESTIONS[name]
    expression = question.differentiable or question.exact
    return lambda inputs: numbers(expression(case.dense(*inputs.of_scores), inputs))


def assert_gradients(case: Case, name: str, backend: str) -> None:
    """That the gradients are within the budget of those that autograd finds for the oracle."""
    function, inputs = with_gradients(case, of_regard(case, name, backend))
    definition, _ = with_gradients(case, of_oracle(case, name))
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


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@parametrised([*SHAPES, *MASKED, *SCORES])
def test_a_gradient_equals_that_of_the_oracle(case: Case, name: str) -> None:
    assert_gradients(case, name, "blocks")


@pytest.mark.parametrize("block_size", ["uneven-rows", "two-heads"], indirect=True)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@parametrised(SHAPES)
def test_a_gradient_from_small_blocks_equals_that_of_the_oracle(
    case: Case, name: str, block_size: None
) -> None:
    assert_gradients(case, name, "blocks")


@parametrised([case for (_, name), case in FUSED.items() if name == "output" and not case.bias])
def test_a_gradient_of_the_fused_output_equals_that_of_the_oracle(case: Case) -> None:
    assert_gradients(case, "output", "fused")


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


@pytest.mark.parametrize("block_size", ["one-row"], indirect=True)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@parametrised(SMALL)
def test_a_gradient_equals_finite_differences(case: Case, name: str, block_size: None) -> None:
    function, inputs = with_gradients(case, of_regard(case, name, "blocks"))
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    # Infinite answers of empty rows have no differences; gradcheck's own tolerances otherwise.
    assert torch.autograd.gradcheck(lambda *x: oracle.finite(function(*x)), leaves)


@parametrised(SMALL)
def test_a_gradient_through_all_questions_at_once_equals_finite_differences(case: Case) -> None:
    def all_answers(inputs: Inputs) -> Tensor:
        asked = [QUESTIONS[name].ask(inputs) for name in DIFFERENTIABLE]
        answers = case.matrix(*inputs.of_scores).reduce(*asked)
        return torch.cat([oracle.finite(numbers(answer)).flatten() for answer in answers])

    function, inputs = with_gradients(case, all_answers)
    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in inputs])


# The fixed numbers of the design, on scores of ordinary size.


@pytest.mark.parametrize("name", ["logsumexp", "entropy"])
@parametrised([case for case in CASES if case.dtype == torch.float32 and case.sharp <= 1])
def test_float32_logsumexp_and_entropy_are_exact_to_1e_5_nats(case: Case, name: str) -> None:
    matrix = case.matrix(*case.inputs.of_scores)
    answer = matrix.reduce(QUESTIONS[name].ask(case.inputs))
    oracle.assert_close(answer, numbers(exact(case, name)), 1e-5)  # the number in design.md


@pytest.mark.parametrize("name", ["sum-keys", "sum-queries", "pool-3x4", "pool-one-cell"])
@parametrised([case for case in CASES if case.dtype == torch.float32 and case.sharp <= 1])
def test_float32_sums_and_pools_are_exact_to_1e_5_relative(case: Case, name: str) -> None:
    matrix = case.matrix(*case.inputs.of_scores)
    right = numbers(exact(case, name))
    answer = matrix.reduce(QUESTIONS[name].ask(case.inputs))
    oracle.assert_close(answer, right, 1e-5 * float(right.max()))  # the number in design.md
