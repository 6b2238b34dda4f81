"""Numbers at their limits, and every mask with every kind of scores, dtype and backend."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import MASKS, QUESTIONS, Case, Inputs, in_turn
from regard.backends import sweep as blocks

SHAPE = {"query": (2, 4, 7, 4), "key": (2, 2, 11, 4), "value_dim": 3}
KINDS = {
    "plain": Case("plain", "scale alone", **SHAPE),
    "sharp": Case("sharp", "nearly all weight on one key", **SHAPE, sharp=30.0),
    "bias": Case("bias", "a bias for each pair", **SHAPE, bias=(4, 7, 11)),
    "alibi": Case("alibi", "slopes", **SHAPE, positions="alibi"),
    "t5": Case("t5", "buckets", **SHAPE, positions="t5"),
    "score-mod": Case("score-mod", "a table", **SHAPE, score_mod="table"),
    "softcap": Case("softcap", "a cap within reach", **SHAPE, softcap=1.5, scale=-1.0),
    "sinks": Case("sinks", "rows below 1", **SHAPE, sinks=True),
    "all": Case("all", "every step", **SHAPE, positions="t5-decoder", score_mod="by-index",
                softcap=3.0, sinks=True),
}  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_and_backend(kind: str, mask: str) -> tuple[torch.dtype, str]:
    """A dtype and a backend for each pair, so that each mask and each kind meets all of them."""
    i, j = list(MASKS).index(mask), list(KINDS).index(kind)
    return DTYPES[(i + j) % len(DTYPES)], "dense" if (i + j // 4) % 3 == 0 else "sweep"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of one sequence or less, which divide no axis."""
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 100)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    monkeypatch.setattr(blocks, "MAX_ROWS", 3)


def numbers(answer: Tensor | regard.Top | oracle.Top) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer.values


def statistic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("small_blocks")
@in_turn(mask=list(MASKS), kind=list(KINDS))
def test_every_answer_equals_the_oracle(mask: str, kind: str, subtests: pytest.Subtests) -> None:
    dtype, backend = dtype_and_backend(kind, mask)
    case = replace(KINDS[kind], mask=mask, dtype=dtype)
    inputs = case.inputs
    doubled = Inputs(*map(oracle.double, inputs))
    dense = case.dense(*doubled.of_scores)
    asked = [question.ask(inputs) for question in QUESTIONS.values()]
    answers = case.matrix(*inputs.of_scores).reduce(*asked, backend=backend)
    for (name, question), answer in zip(QUESTIONS.items(), answers, strict=True):
        with subtests.test(name):
            exact = question.exact(dense, doubled)
            as_answered = dtype if question.kind == "product" else statistic(dtype)
            as_plain = Inputs(*(None if x is None else x.to(as_answered) for x in inputs))
            plain = question.exact(case.dense(*as_plain.of_scores), as_plain)
            within = question.allowed_error(
                numbers(exact), numbers(plain), dtype=as_answered, scores=case.largest_score
            )
            oracle.assert_close(numbers(answer), numbers(exact), within)
            if isinstance(exact, oracle.Top):
                assert torch.equal(answer.indices == -1, exact.indices == -1)


# Large scores.

FLOAT32 = torch.finfo(torch.float32).eps


def given(scores: Tensor, backend: str = "sweep") -> list[Tensor]:
    A = regard.AttentionMatrix.from_scores(scores)
    asked = (regard.LogSumExp(), regard.Entropy(), regard.Pool(99, 99), regard.TopK(3))
    *statistics, top = A.reduce(*asked, backend=backend)
    return [*statistics, top.values, top.indices]


@pytest.mark.parametrize("size", [1e3, 1e4, 1e6, 1e9, 1e18, 1e30, 1e38], ids="{:g}".format)
def test_large_scores_have_the_answers_of_the_oracle(size: float) -> None:
    # Keys that share the largest score, some just below it, and some on the other side of 0.
    steps = torch.tensor([1.0, 1.0, 1.0 - 2**-13, 0.5, 0.0, -1.0, 1.0])
    scores = size * torch.stack([steps, -steps, steps.roll(3), 0 * steps])
    lse, entropy, weights, values, indices = given(scores)
    dense = oracle.softmax(scores.double())
    # A rounding of scores of this size is all that a float32 logsumexp can have.
    oracle.assert_close(lse, oracle.logsumexp(dense), 2 * FLOAT32 * size)
    # A difference of two scores that are given has one rounding, of the size of the difference:
    # the largest below which a weight does not vanish is about 100.
    oracle.assert_close(weights, dense.weights, 1e-5)
    oracle.assert_close(entropy, oracle.entropy(dense), 1e-5)
    exact = oracle.topk(dense, 3)
    oracle.assert_close(values, exact.values, 1e-5)
    if size <= 1e18:  # a key 1e19 below the largest score counts as masked
        assert torch.equal(indices, exact.indices)


@pytest.mark.parametrize("size", [1e9, 1e18, 1e30], ids="{:g}".format)
def test_large_scores_have_finite_gradients(size: float) -> None:
    scores = (size * torch.tensor([[1.0, 0.5, -1.0, 1.0]])).requires_grad_()
    A = regard.AttentionMatrix.from_scores(scores)
    lse, entropy, received = A.reduce(regard.LogSumExp(), regard.Entropy(), regard.Sum(-2))
    (gradient,) = torch.autograd.grad(lse.sum() + entropy.sum() + received[0], scores)
    # Half of the weight on each end: the logsumexp gives it; the sum 1/4 and -1/4.
    torch.testing.assert_close(gradient, torch.tensor([[0.75, 0.0, 0.0, 0.25]]))


@pytest.mark.parametrize("backend", [None, "sweep", "dense"], ids=str)
def test_scores_that_overflow_float16_are_numbers(backend: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 9, 8, generator=generator).half() for _ in range(3))
    query, key = 200 * query, 200 * key  # of their products many are above 65504
    A, dense = regard.attend(query, key), oracle.attend(query.double(), key.double())
    lse = A.reduce(regard.LogSumExp(), backend=backend)
    output = A.reduce(regard.Output(value), backend=backend)
    # A score of 1e6 has roundings of float32 in its eight products.
    size = float(dense.scores.abs().max())
    oracle.assert_close(lse, oracle.logsumexp(dense), 8 * FLOAT32 * size)
    exact = oracle.product(dense, value.double())
    oracle.assert_close(output, exact, 8 * FLOAT32 * size + 2 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("gap", [80.0, 88.0, 95.0, 103.0, 110.0])
def test_weights_below_the_smallest_normal_number_are_exact_to_that_number(gap: float) -> None:
    scores = torch.zeros(64, 37)
    scores[:, 1:] = -gap
    lse, entropy, weights, *_ = given(scores)
    dense = oracle.softmax(scores.double())
    tiny = torch.finfo(torch.float32).tiny  # worker threads take what is below for 0
    oracle.assert_close(weights[:, 1:], dense.weights[:, 1:], tiny + 1e-5 * math.exp(-gap))
    oracle.assert_close(lse, oracle.logsumexp(dense), FLOAT32)
    oracle.assert_close(entropy, oracle.entropy(dense), 37 * gap * tiny + 1e-35)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [1e-20, 1e-22, 1e-38, 1e-42], ids="{:g}".format)
def test_inputs_whose_products_are_denormal_give_even_weights(size: float) -> None:
    query, key, value = (size * torch.randn(2, 37, 4) for _ in range(3))
    A, dense = regard.attend(query, key), oracle.attend(query.double(), key.double())
    asked = (regard.Entropy(), regard.Sum(-2), regard.Pool(5, 5))
    entropy, received, picture = A.reduce(*asked)
    oracle.assert_close(entropy, oracle.entropy(dense), 1e-5)  # the numbers in design.md
    oracle.assert_close(received, dense.weights.sum(-2), 1e-5)
    oracle.assert_close(picture, oracle.pool(dense, 5, 5), 1e-5 / 37)
    exact = oracle.product(dense, value.double())
    # Each of the 37 products is flushed to 0 below the smallest number; some roundings above it.
    within = 37 * torch.finfo(torch.float32).tiny + 8 * FLOAT32 * size
    oracle.assert_close(A.reduce(regard.Output(value), backend="sweep"), exact, within)


# Blocks that hold nothing, and axes without entries.


@pytest.mark.usefixtures("small_blocks")
def test_whole_blocks_may_be_masked_in_the_middle(subtests: pytest.Subtests) -> None:
    case = Case("holes", "blocks without keys", (2, 2, 23, 3), (2, 1, 19, 3))
    inputs, doubled = case.inputs, Inputs(*map(oracle.double, case.inputs))
    allowed = torch.ones(23, 19, dtype=torch.bool)
    allowed[6:15], allowed[:, 7:12] = False, False
    A = regard.attend(inputs.query, inputs.key, mask=allowed)
    dense = oracle.attend(doubled.query, doubled.key, allowed=allowed)
    in_float32 = oracle.attend(inputs.query, inputs.key, allowed=allowed)
    for name, question in QUESTIONS.items():
        with subtests.test(name):
            found, exact = A.reduce(question.ask(inputs)), question.exact(dense, doubled)
            plain = question.exact(in_float32, inputs)
            within = question.allowed_error(
                numbers(exact), numbers(plain), dtype=torch.float32, scores=case.largest_score
            )
            oracle.assert_close(numbers(found), numbers(exact), within)


EMPTY: dict[str, tuple[Callable[[regard.AttentionMatrix], Tensor], tuple[int, ...]]] = {
    "rows": (lambda A: A[..., 0:0, :], (2, 3, 0, 7)),
    "columns": (lambda A: A[..., :, 9:], (2, 3, 5, 0)),
    "rows-and-columns": (lambda A: A[..., 3:3, 4:2], (2, 3, 0, 0)),
    "columns-of-a-row": (lambda A: A[1, 2, 3, 0:0], (0,)),
    "rows-of-scores": (lambda A: A.scores[..., 0:0, :], (2, 3, 0, 7)),
    "columns-of-scores": (lambda A: A.scores[0, ..., 7:], (3, 5, 0)),
    "diagonal": (lambda A: A.diagonal(7), (2, 3, 0)),
    "far-diagonal": (lambda A: A.diagonal(-99), (2, 3, 0)),
}


@pytest.mark.parametrize("mask", [None, regard.Causal(), regard.Padding(0)], ids=str)
@pytest.mark.parametrize(("part", "shape"), EMPTY.values(), ids=EMPTY)
def test_a_part_without_entries_is_an_empty_tensor(
    part: Callable, shape: tuple[int, ...], mask: regard.Mask | None
) -> None:
    query, key = torch.randn(2, 3, 5, 4).requires_grad_(), torch.randn(2, 3, 7, 4)
    found = part(regard.attend(query, key, mask=mask))
    assert found.shape == shape
    assert found.dtype == torch.float32
    if found.requires_grad:
        (gradient,) = torch.autograd.grad(found.sum(), query)
        assert not gradient.any()


# The same bits every time.


def answers(length: int) -> list[Tensor]:
    """Statistics, products and gradients, many of them sums over blocks."""
    generator = torch.Generator().manual_seed(length)
    tensors = [torch.randn(2, 3, length, 4, generator=generator) for _ in range(3)]
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    A, B = regard.attend(query, key, mask=regard.SlidingWindow(9, 3)), regard.attend(key, query)
    found = A.reduce(regard.Entropy(), regard.Sum(-2), regard.Pool(3, 4), regard.Output(value))
    products = [A.T @ value, A @ value, regard.rollout([A, B]) @ value[:, 0]]
    found = [*found, A.topk(2).values, regard.js(A, B), *products]
    total = sum((answer.sin().sum() for answer in found), torch.zeros(()))
    return [*found, *torch.autograd.grad(total, (query, key, value))]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "threads", [3, *(pytest.param(count, marks=pytest.mark.full) for count in (1, 2, 5))]
)
def test_any_number_of_threads_gives_the_same_bits_twice(threads: int) -> None:
    before = torch.get_num_threads()
    expected = answers(29)
    torch.set_num_threads(threads)
    try:
        first, second = answers(29), answers(29)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, expected))
