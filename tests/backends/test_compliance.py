"""Every question to every kind of matrix, by every backend: values, and gradients."""

import pytest
import torch

import oracle
from cases import (
    CASES,
    CHOSEN,
    MANY,
    MASKED,
    QUESTIONS,
    SCORES,
    SHAPES,
    Case,
    by_name,
    in_turn,
    parametrised,
)
from compliance import assert_answers, assert_gradients, of_regard, with_gradients
from noting import noting
from regard.backends import sweep as blocks
from regard.backends.choose import BACKENDS
from regard.backends.cpu import cpu_backend
from regard.backends.cpu.cpu_backend import has_gradients

# How large blocks are made: (numbers in a block, fewest rows, most rows).
BLOCKS = {
    "one-row": (1, 1, 1),
    "uneven-rows": (1, 3, 3),
    "two-heads": (2 * 13 * 13, 2, 13),
    "four-heads": (4 * 7 * 7, 2, 13),
    "four-of-a-group": (4 * 3 * 3, 2, 13),
}
BLOCKED = [case for case in (*SHAPES, *MASKED, *SCORES) if "square" not in case.name]
ASKED = tuple(QUESTIONS)
DIFFERENTIABLE = tuple(name for name in ASKED if name != "top-1")


def make_blocks_small(size: tuple[int, int, int], patch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("BLOCK_SIZE", "MIN_ROWS", "MAX_ROWS"), size, strict=True):
        patch.setattr(blocks, name, value)


def taken_by(backend: str, case: Case) -> list[str]:
    """The questions that a backend answers on this matrix."""
    matrix = case.matrix(*case.inputs.of_scores)
    refusal = BACKENDS[backend].refusal
    return [
        name
        for name, question in QUESTIONS.items()
        if refusal(matrix.source, matrix.mask, [question.ask(case.inputs)]) is None
    ]


FUSED = {case.name: names for case in CASES if (names := taken_by("sdpa", case))}
COMPILED = {case.name: names for case in CASES if (names := taken_by("cpu", case))}


@pytest.mark.sampled(64)
@pytest.mark.parametrize("backend", ["sweep", "dense"])
@parametrised(CASES)
def test_all_answers_of_one_pass_equal_the_oracle(case: Case, backend: str) -> None:
    assert_answers(case, ASKED, backend)


@pytest.mark.sampled(20)
@in_turn(case=by_name(BLOCKED), size=BLOCKS)
def test_all_answers_from_small_blocks_equal_the_oracle(
    case: Case,
    size: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_blocks_small(size, monkeypatch)
    assert_answers(case, ASKED, "sweep")


def test_answers_about_one_text_whose_blocks_cut_groups_of_values_equal_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_blocks_small(BLOCKS["four-of-a-group"], monkeypatch)
    assert_answers(Case("", "", (1, 10, 3, 2), (1, 10, 3, 2), value=(1, 2)), ASKED, "sweep")


# Reductions that share a block share what it computes, so each is asked alone as well.


@pytest.mark.sampled(4)
@in_turn(case=by_name(CHOSEN), size={"whole": None, "uneven-rows": BLOCKS["uneven-rows"]})
def test_an_answer_alone_equals_the_oracle(
    case: Case,
    size: tuple[int, int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if size is not None:
        make_blocks_small(size, monkeypatch)
    for name in ASKED:
        assert_answers(case, [name], None)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sweep", "dense"])
@parametrised(CASES)
def test_an_answer_alone_to_any_case_equals_the_oracle(case: Case, backend: str) -> None:
    for name in ASKED:
        assert_answers(case, [name], backend)


@parametrised([case for case in CASES if case.name in FUSED])
def test_an_answer_of_the_fused_backend_equals_the_oracle(case: Case) -> None:
    for name in FUSED[case.name]:
        assert_answers(case, [name], "sdpa")


def test_the_fused_backend_takes_the_output_of_the_usual_cases() -> None:
    for name in ("no-batch", "tokens-dim", "grouped", "plain-float32", "square-causal"):
        assert "output" in FUSED[name]


# The compiled kernels, which compute a tile of some columns at a time.

TILES = {"one-tile": cpu_backend.TILE, "tiles-of-1": 1, "tiles-of-4": 4}


@pytest.mark.sampled(31)
@in_turn(case=by_name([case for case in CASES if case.name in COMPILED]), tile=TILES)
def test_all_answers_of_the_compiled_kernels_equal_the_oracle(
    case: Case, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "TILE", tile)
    assert_answers(case, COMPILED[case.name], "cpu")


@pytest.mark.sampled(20)
@in_turn(case=by_name([case for case in BLOCKED if case.name in COMPILED]), size=BLOCKS)
def test_all_answers_of_the_compiled_kernels_from_small_blocks_equal_the_oracle(
    case: Case,
    size: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_blocks_small(size, monkeypatch)
    monkeypatch.setattr(cpu_backend, "TILE", 4)
    assert_answers(case, COMPILED[case.name], "cpu")


@pytest.mark.sampled(4)
@in_turn(case=by_name([case for case in CHOSEN if case.name in COMPILED]), tile=TILES)
def test_an_answer_of_the_compiled_kernels_alone_equals_the_oracle(
    case: Case, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "TILE", tile)
    for name in COMPILED[case.name]:
        assert_answers(case, [name], "cpu")


@pytest.mark.sampled(25)
@in_turn(
    case=by_name([case for case in (*SHAPES, *MASKED, *SCORES) if case.name in COMPILED]),
    tile=TILES,
)
def test_gradients_of_the_compiled_kernels_equal_those_of_the_oracle(
    case: Case, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "TILE", tile)
    names = [name for name in COMPILED[case.name] if name in DIFFERENTIABLE]
    compiled = [name for name in names if has_gradients([QUESTIONS[name].ask(case.inputs)])]
    assert {"logsumexp", "sum-queries"} <= {*compiled}
    assert_gradients(case, compiled, "cpu")


@parametrised([case for case in CHOSEN if case.name in COMPILED and case.dtype == torch.float32])
def test_a_gradient_without_a_compiled_kernel_equals_that_of_the_oracle(case: Case) -> None:
    for names in (["max-score"], ["max-score", "logsumexp", "transposed-output"]):
        assert_gradients(case, names, "cpu")


# Gradients.


@pytest.mark.sampled(25)
@parametrised([*SHAPES, *MASKED, *SCORES])
def test_gradients_of_all_answers_equal_those_of_the_oracle(case: Case) -> None:
    assert_gradients(case, DIFFERENTIABLE, "sweep")


FEW_BLOCKS = {name: BLOCKS[name] for name in ("uneven-rows", "two-heads")}


@pytest.mark.sampled(7)
@in_turn(case=by_name(SHAPES), size=FEW_BLOCKS)
def test_gradients_of_all_answers_from_small_blocks_equal_those_of_the_oracle(
    case: Case, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_blocks_small(size, monkeypatch)
    assert_gradients(case, DIFFERENTIABLE, "sweep")


def assert_gradients_alone(case: Case) -> None:
    for name in DIFFERENTIABLE:
        with noting(f"the question: {name}"):
            assert_gradients(case, [name], "sweep")


@pytest.mark.sampled(3)
@parametrised([case for case in CHOSEN if case.dtype == torch.float32 and case not in MANY])
def test_a_gradient_of_one_answer_equals_that_of_the_oracle(case: Case) -> None:
    assert_gradients_alone(case)


@pytest.mark.full
@parametrised([*SHAPES, *MASKED, *SCORES])
def test_a_gradient_of_one_answer_to_any_case_equals_that_of_the_oracle(case: Case) -> None:
    assert_gradients_alone(case)


@pytest.mark.full
@pytest.mark.parametrize("size", FEW_BLOCKS.values(), ids=FEW_BLOCKS)
@parametrised(SHAPES)
def test_a_gradient_of_one_answer_from_small_blocks_equals_that_of_the_oracle(
    case: Case,
    size: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_blocks_small(size, monkeypatch)
    assert_gradients_alone(case)


@parametrised([case for case in CASES if "output" in FUSED.get(case.name, ()) and not case.bias])
def test_a_gradient_of_the_fused_output_equals_that_of_the_oracle(case: Case) -> None:
    assert_gradients(case, ["output"], "sdpa")


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
    function, inputs = with_gradients(case, of_regard(case, DIFFERENTIABLE, "sweep"))
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
    function, inputs = with_gradients(case, of_regard(case, [name], "sweep"))
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(lambda *x: oracle.finite(function(*x)), leaves)
