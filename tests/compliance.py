"""Answers to the questions of ``cases``, and their gradients, compared with those of the oracle."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

import oracle
import regard
from cases import QUESTIONS, Case, Inputs, Question
from noting import noting


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
    assert numbers(actual).dtype == dtype, numbers(actual).dtype
    budget = within(case, name, dtype)
    oracle.assert_close(numbers(actual), numbers(exact(case, name)), budget)
    if not isinstance(actual, Tensor):
        assert_indices(actual, case, name, budget)


def assert_indices(actual: regard.Top, case: Case, name: str, budget: float) -> None:
    """That the keys are distinct and have these weights; near ties may change places."""
    right = exact(case, name)
    assert isinstance(right, oracle.Top)
    assert actual.indices.dtype == torch.int64, actual.indices.dtype
    assert torch.equal(actual.indices == -1, right.indices == -1)
    weights = exact(case, "pool-beyond")
    assert isinstance(weights, Tensor)
    many = actual.indices if actual.indices.ndim == weights.ndim else actual.indices[..., None]
    taken = weights.gather(-1, many.clamp(min=0)).masked_fill(many == -1, 0)
    oracle.assert_close(taken.reshape(right.values.shape), right.values, budget)
    in_order = many.sort(-1).values
    assert not bool(((in_order.diff(dim=-1) == 0) & (in_order[..., 1:] >= 0)).any())


def assert_answers(case: Case, names: Sequence[str], backend: str | None) -> None:
    """That each of these questions, asked together, is answered as the oracle answers it."""
    asked = [QUESTIONS[name].ask(case.inputs) for name in names]
    answers = case.matrix(*case.inputs.of_scores).reduce(*asked, backend=backend)
    for name, answer in zip(names, answers if len(names) > 1 else (answers,), strict=True):
        with noting(f"the question: {name}"):
            assert_answer(answer, case, name, backend)


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


@cache
def exact_gradients(case: Case, names: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that the oracle has in float64, and in the dtype of the case."""
    definition, inputs = with_gradients(case, of_oracle(case, names))
    doubled = [tensor.double() for tensor in inputs]
    return oracle.gradients(definition, doubled), oracle.gradients(definition, inputs)


def assert_gradients(case: Case, names: Sequence[str], backend: str) -> None:
    """That the gradients of a randomly weighted sum of the answers are those of the oracle."""
    function, inputs = with_gradients(case, of_regard(case, names, backend))
    found = oracle.gradients(function, inputs)
    right, plain = exact_gradients(case, tuple(names))
    for actual, exactly, plainly in zip(found, right, plain, strict=True):
        assert actual.dtype == case.dtype, actual.dtype
        # A gradient is a difference of numbers of the size of its terms: value times key or query.
        unit = float(exactly.abs().max()) + case.largest_score
        budget = oracle.allowed_error(
            exactly, plainly, dtype=case.dtype, scores=case.largest_score, unit=unit
        )
        oracle.assert_close(actual, exactly, budget)
