"""No tensor of the size of the matrix is ever made, forwards or backwards."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from cases import full_but
from largest_tensor import LENGTH, MATRIX, MOST, inputs, largest
from regard.backends.sweep import PlainBlocks, SweepTask
from regard.reductions.products import TransposedOutput, WeightTile
from regard.scores.query_key import QueryKeyScores

UNTIL = [(0, i + 1) for i in range(LENGTH)]  # they overlap as much as spans can
REDUCTIONS: dict[str, Callable[[Tensor], regard.Reduction]] = {
    "logsumexp": lambda _: regard.LogSumExp(),
    "max-score": lambda _: regard.MaxScore(),
    "entropy": lambda _: regard.Entropy(),
    "topk": lambda _: regard.TopK(8),
    "sum-keys": lambda _: regard.Sum(-1),
    "sum-queries": lambda _: regard.Sum(-2),
    "pool": lambda _: regard.Pool(128, 128),
    "segments": lambda _: regard.Segments([(0, 1000), (1000, LENGTH)]),
    "segments-until": lambda _: regard.Segments([(5, LENGTH), (0, 9)], UNTIL),
    "until-segments": lambda _: regard.Segments(UNTIL, [(5, LENGTH), (0, 9)]),
    "diagonal": lambda _: regard.Diagonal(-1),
    "window": lambda _: WeightTile(range(0, LENGTH, 500), range(0, LENGTH, 500)),
    "output": regard.Output,
    "transposed-output": TransposedOutput,
}
MASKS: dict[str, regard.Mask | None] = {
    "no-mask": None,
    "causal": regard.Causal(),
    "window": regard.SlidingWindow(100, 0),
    "causal-and-padding": regard.Causal() & regard.Padding(4000),
    "padding": regard.Padding(4000),
    "keys": regard.Keep(torch.arange(LENGTH) % 3 > 0),
    "prefix": regard.PrefixLM(1000),
    "documents": regard.Documents(torch.arange(LENGTH) // 900),
    "scattered-documents": regard.Documents(torch.arange(LENGTH) % 5),
    "either": regard.SlidingWindow(100, 0) | regard.Keep(torch.arange(LENGTH) < 10),
    "not": ~(regard.Padding(4000) & regard.SlidingWindow(100, 0)),
    "mask-mod": regard.MaskMod(lambda _, __, q_idx, kv_idx: (q_idx + kv_idx) % 7 > 1),
}
masks = pytest.mark.parametrize(
    "mask", full_but(MASKS, "causal-and-padding", "scattered-documents")
)
reductions = pytest.mark.parametrize("reduction", full_but(REDUCTIONS, "window"))


def test_the_sweep_takes_larger_blocks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1).expand(64, 16_384, 1)
    A = regard.attend(x, x)

    def boxes() -> list[int]:
        task = SweepTask(A.source, None, (regard.Entropy(),), PlainBlocks())
        return [prod(box.size) for box in task.boxes]

    on_cpu = boxes()
    monkeypatch.setattr(QueryKeyScores, "device", property(lambda _: torch.device("cuda")))
    on_gpu = boxes()
    assert (max(on_cpu), max(on_gpu)) == (2**20, 2**25)
    assert sum(on_cpu) == sum(on_gpu) == 64 * 16_384**2


@pytest.mark.full
def test_all_reductions_of_one_pass_never_make_the_matrix() -> None:
    query, key, value = inputs(gradients=True)

    def work() -> None:
        asked = [reduction(value) for reduction in REDUCTIONS.values()]
        answers = regard.attend(query, key, mask=regard.Causal()).reduce(*asked)
        numbers = [each if isinstance(each, Tensor) else each.values for each in answers]
        torch.stack([each.sum() for each in numbers]).sum().backward()

    assert largest(work) < MOST


@reductions
def test_a_reduction_never_makes_the_matrix(
    reduction: Callable[[Tensor], regard.Reduction],
) -> None:
    query, key, value = inputs(gradients=False)
    matrix = regard.attend(query, key)
    assert largest(lambda: matrix.reduce(reduction(value))) < MOST


@reductions
def test_the_gradient_of_a_reduction_never_makes_the_matrix(
    reduction: Callable[[Tensor], regard.Reduction],
) -> None:
    query, key, value = inputs(gradients=True)

    def work() -> None:
        answer = regard.attend(query, key).reduce(reduction(value))
        numbers = answer if isinstance(answer, Tensor) else answer.values
        numbers.sum().backward()

    assert largest(work) < MOST


@masks
def test_no_mask_makes_the_matrix(mask: regard.Mask | None) -> None:
    query, key, _ = inputs(gradients=True)

    def work() -> None:
        matrix = regard.attend(query, key, mask=mask)
        entropy, received = matrix.reduce(regard.Entropy(), regard.Sum(-2))
        (entropy.sum() + received.square().sum()).backward()

    assert largest(work) < MOST


# Beside what a mask hides: each step of the scores, with the tensors that gradients flow to.
STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "alibi": lambda: {"bias": regard.ALiBi(torch.ones(1, requires_grad=True))},
    "t5": lambda: {"bias": regard.T5Bias(torch.zeros(32, 1, requires_grad=True))},
    "score-mod": lambda: {"score_mod": lambda score, *at: score.tanh() + at[-1]},
    "softcap": lambda: {"softcap": 2.0},
    "sinks": lambda: {"sink_bias": torch.zeros(1, requires_grad=True)},
    "bias-of-keys": lambda: {"bias": torch.zeros(LENGTH, requires_grad=True)},
}


@pytest.mark.parametrize("step", full_but(STEPS, "t5"))
def test_no_kind_of_scores_makes_the_matrix(step: Callable[[], dict[str, Any]]) -> None:
    query, key, value = inputs(gradients=True)

    def work() -> None:
        matrix = regard.attend(query, key, **step())
        entropy, top, output = matrix.reduce(regard.Entropy(), regard.TopK(8), regard.Output(value))
        (entropy.sum() + top.values.sum() + output.square().sum()).backward()

    assert largest(work) < MOST


def distance(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs().float()


ASKED_OF_TWO: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "kl": lambda q, k, _: regard.kl(regard.attend(q, k), regard.attend(k, q)),
    "cross-entropy": lambda q, k, _: regard.cross_entropy(regard.attend(q, k), regard.attend(k, q)),
    "js": lambda q, k, _: regard.js(regard.attend(q, k, mask=regard.Causal()), regard.attend(k, q)),
    "bilinear": lambda q, k, _: regard.weighted_sum(regard.attend(q, k), distance),
    "rollout": lambda q, k, v: regard.rollout([regard.attend(q, k), regard.attend(k, q)]) @ v[0],
    "two-products": lambda q, k, v: regard.attend(q, k).T @ (regard.attend(k, q) @ v),
}


@pytest.mark.parametrize("ask", full_but(ASKED_OF_TWO, "two-products"))
def test_no_question_about_two_matrices_makes_one(
    ask: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    query, key, value = inputs(gradients=True)
    assert largest(lambda: ask(query, key, value).sum().backward()) < MOST


@masks
def test_a_product_with_a_mask_never_makes_the_matrix(mask: regard.Mask | None) -> None:
    query, key, value = inputs(gradients=True)

    def work() -> None:
        (regard.attend(query, key, mask=mask) @ value).sum().backward()

    assert largest(work) < MOST


@pytest.mark.parametrize(
    "bias",
    [
        pytest.param(torch.zeros(LENGTH), id="keys"),
        pytest.param(torch.zeros(LENGTH, 1), id="queries"),
        pytest.param(torch.zeros(LENGTH, requires_grad=True), id="with-a-gradient"),
    ],
)
def test_a_product_with_a_bias_never_makes_the_matrix(bias: Tensor) -> None:
    query, key, value = inputs(gradients=True)
    assert largest(lambda: regard.attend(query, key, bias=bias) @ value) < MOST


def test_a_product_of_grouped_heads_repeats_no_key() -> None:
    _, key, value = inputs(gradients=False)
    query = torch.randn(8, LENGTH, 8)
    assert largest(lambda: regard.attend(query, key) @ value) <= 2 * query.numel()


PARTS: dict[str, Callable[[regard.AttentionMatrix], Tensor]] = {
    "window": lambda m: m[0, 100:200, :50],
    "row": lambda m: m[0, 7],
    "column": lambda m: m[0, :, 7],
    "steps": lambda m: m[0, ::500, ::500],
    "scores": lambda m: m.scores[0, 7:9],
    "column-of-scores": lambda m: m.scores[0, :, 7],
    "steps-of-scores": lambda m: m.scores[0, ::500, ::500],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_never_makes_the_matrix(part: Callable) -> None:
    query, key, _ = inputs(gradients=False)
    matrix = regard.attend(query, key, mask=regard.Causal())
    assert largest(lambda: part(matrix)) < MOST


def test_the_fused_product_with_a_wide_value_never_makes_the_matrix() -> None:
    query, key, value = inputs(gradients=False)
    wide = torch.cat((value, value), -1)
    assert largest(lambda: regard.attend(query, key) @ wide) < MOST


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(lambda m: m.to_dense(), id="to-dense"),
        pytest.param(lambda m: m.scores.to_dense(), id="scores-to-dense"),
        pytest.param(lambda m: m.reduce(regard.Entropy(), backend="dense"), id="dense-backend"),
    ],
)
def test_the_check_itself_fails_on_what_makes_the_matrix(whole: Callable) -> None:
    query, key, _ = inputs(gradients=False)
    assert largest(lambda: whole(regard.attend(query, key))) >= MATRIX


class Wasteful(regard.Reduction):
    """A reduction that makes a matrix in each block, on whatever thread."""

    thread_safe = True

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return ()

    def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
        block.maximum.new_zeros(LENGTH, LENGTH)
        return ()

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> None:
        return None


@pytest.mark.full
def test_the_check_sees_what_the_threads_of_a_sweep_make() -> None:
    query, key, _ = inputs(gradients=False)
    matrix = regard.attend(query, key)
    assert largest(lambda: matrix.reduce(Wasteful(), regard.Sum(-2))) >= MATRIX


def test_the_check_sees_what_the_backward_pass_makes() -> None:
    x = torch.ones(LENGTH, requires_grad=True)
    squared = x[:, None].expand(LENGTH, LENGTH).pow(2)
    gradient = torch.ones(1).expand(LENGTH, LENGTH)
    assert largest(lambda: squared.backward(gradient)) >= MATRIX


@pytest.mark.parametrize(
    "strided",
    [
        pytest.param(lambda x: x.mT.contiguous().mT, id="transposed, as in the notebooks"),
        pytest.param(lambda x: x.repeat_interleave(2, -1)[..., ::2], id="every second number"),
    ],
)
def test_numbers_that_do_not_lie_side_by_side_form_no_matrix(
    strided: Callable[[Tensor], Tensor],
) -> None:
    query, key, value = map(strided, inputs(gradients=False))
    assert query.stride(-1) != 1
    assert largest(lambda: regard.attend(query, key) @ value) < MOST


def test_steps_over_scores_keep_nothing_of_what_they_skip() -> None:
    query, key, _ = inputs(gradients=True)
    scores = regard.attend(query, key, mask=regard.Causal()).scores[..., ::64, ::64]
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, id):
        scores = regard.attend(query, key, mask=regard.Causal()).scores[..., ::64, ::64]
    assert scores.shape == (1, 64, 64)
    assert max([0, *kept]) < 64 * LENGTH
