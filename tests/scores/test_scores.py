"""Scores as models make them, against the code of those models; and parts of such matrices."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

import oracle
import regard
from matrix_parts import LEADING
from regard.backends import sweep as blocks

# Tests import transformers themselves: it takes four seconds.
QUERY = torch.randn(2, 6, 7, 4, generator=torch.Generator().manual_seed(0))
KEY, VALUE = torch.randn(2, 2, 2, 11, 4, generator=torch.Generator().manual_seed(1)).unbind()
TABLE = torch.randn(32, 6, generator=torch.Generator().manual_seed(2))
LOGITS = torch.randn(6, generator=torch.Generator().manual_seed(3))
TIGHT = {"atol": 1e-6, "rtol": 1e-6}  # a few roundings of numbers of size 1


def by_place(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + 4 * b + 2 * h + q_idx / 4 - kv_idx / 8  # exact: rounding adds no error


# ALiBi.


def get_slopes(n: int) -> list[float]:
    """The code that the paper's authors published, word for word."""

    def get_slopes_power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        ratio = start
        return [start * ratio**i for i in range(n)]

    if math.log2(n).is_integer():
        return get_slopes_power_of_2(n)
    closest_power_of_2 = 2 ** math.floor(math.log2(n))
    return (
        get_slopes_power_of_2(closest_power_of_2)
        + get_slopes(2 * closest_power_of_2)[0::2][: n - closest_power_of_2]
    )


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 16, 71])
def test_the_slopes_of_alibi_are_those_of_the_paper(num_heads: int) -> None:
    scores = regard.attend(
        torch.zeros(num_heads, 1, 1), torch.zeros(num_heads, 2, 1), bias=regard.ALiBi(num_heads)
    ).scores[:, 0, 0]
    torch.testing.assert_close(-scores, torch.tensor(get_slopes(num_heads)), atol=0, rtol=1e-6)


def test_alibi_falls_with_the_distance_on_both_sides() -> None:
    x = torch.zeros(3, 1)
    A = regard.attend(x, x, bias=regard.ALiBi(torch.tensor([2.0])))
    assert A.scores[1].tolist() == [-2, 0, -2]


def test_alibi_puts_the_last_query_at_the_last_key() -> None:
    A = regard.attend(torch.zeros(2, 1), torch.zeros(3, 1), bias=regard.ALiBi(torch.ones(1)))
    assert A.scores[:, :].tolist() == [[-1, 0, -1], [-2, -1, 0]]


def test_the_distances_of_low_precision_slopes_are_exact() -> None:
    slopes = -torch.ones(1, dtype=torch.bfloat16)
    query, key = torch.zeros(1, 1).bfloat16(), torch.zeros(259, 1).bfloat16()
    A = regard.attend(query, key, bias=regard.ALiBi(slopes))
    # Distances 258 and 257; bfloat16 has no odd numbers there.
    assert (A[0, 0] / A[0, 1]).item() == pytest.approx(math.e, rel=2 * 2**-8)


# T5.


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 11), (1, 300), (300, 421), (5, 2)])
def test_t5_positions_equal_those_of_transformers(
    q_len: int, kv_len: int, bidirectional: bool
) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    query_at, key_at = oracle.positions(q_len, kv_len)
    bucket = T5Attention._relative_position_bucket(key_at - query_at, bidirectional)
    bias = regard.T5Bias(TABLE, bidirectional=bidirectional)
    A = regard.attend(torch.zeros(1, 6, q_len, 4), torch.zeros(1, 6, kv_len, 4), bias=bias)
    assert torch.equal(A.scores.to_dense()[0], TABLE[bucket].permute(2, 0, 1))


def test_a_position_bias_says_what_it_is() -> None:
    assert repr(regard.ALiBi(6)) == "ALiBi(6)"
    assert repr(regard.T5Bias(TABLE)) == "T5Bias(bidirectional=True, max_distance=128)"


# Softcap and sinks.


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap_equals_gemma_2(softcap: float) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2

    module = SimpleNamespace(num_key_value_groups=3, training=False)
    hidden = torch.zeros(7, 11).masked_fill(~oracle.causal(7, 11), -torch.inf)
    output, weights = gemma2(module, QUERY, KEY, VALUE, hidden, scaling=0.3, softcap=softcap)
    A = regard.attend(QUERY, KEY, mask=regard.Causal(), scale=0.3, softcap=softcap)
    torch.testing.assert_close(A.to_dense(), weights, **TIGHT)
    torch.testing.assert_close(A @ VALUE, output.transpose(1, 2), **TIGHT)


def test_sinks_equal_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=LOGITS)
    hidden = torch.zeros(7, 11).masked_fill(~oracle.window(7, 11, 3, 0), -torch.inf)
    output, weights = gpt_oss(module, QUERY, KEY, VALUE, hidden, scaling=0.3)
    A = regard.attend(QUERY, KEY, mask=regard.SlidingWindow(3, 0), scale=0.3, sink_bias=LOGITS)
    torch.testing.assert_close(A.to_dense(), weights, **TIGHT)
    torch.testing.assert_close(A @ VALUE, output.transpose(1, 2), **TIGHT)


def test_one_sink_stands_for_all_heads() -> None:
    one = regard.attend(QUERY, KEY, sink_bias=torch.tensor(0.7))
    each = regard.attend(QUERY, KEY, sink_bias=torch.full((6,), 0.7))
    assert torch.equal(one.to_dense(), each.to_dense())


def test_a_sink_takes_its_share_of_a_matrix_without_heads() -> None:
    A = regard.attend(torch.zeros(2, 1), torch.zeros(3, 1), sink_bias=torch.zeros(1))
    torch.testing.assert_close(A.sum(-1), torch.tensor([0.75, 0.75]))


def test_a_row_with_nothing_but_a_sink_has_no_weights_and_no_entropy() -> None:
    nothing = torch.zeros(1, dtype=torch.bool)
    A = regard.attend(torch.zeros(1, 1), torch.zeros(3, 1), mask=nothing, sink_bias=torch.zeros(1))
    assert A[0].tolist() == [0, 0, 0]
    assert (A.entropy().item(), A.logsumexp().item()) == (0, -math.inf)


# score_mod.

SLOPES = torch.randn(6, generator=torch.Generator().manual_seed(4))
PAIRS = torch.randn(6, 7, 11, generator=torch.Generator().manual_seed(5))
SCORE_MODS: dict[str, Callable[..., Tensor]] = {
    "unchanged": lambda score, b, h, q_idx, kv_idx: score,  # noqa: ARG005
    "by-place": by_place,
    "slopes": lambda score, b, h, q_idx, kv_idx: score + SLOPES[h] * (q_idx - kv_idx),  # noqa: ARG005
    "pairs": lambda score, b, h, q_idx, kv_idx: score * PAIRS[h, q_idx, kv_idx],  # noqa: ARG005
    "row-0": lambda score, b, h, q_idx, kv_idx: score + PAIRS[h, 0, kv_idx],  # noqa: ARG005
    "chosen": lambda score, b, h, q_idx, kv_idx: torch.where(  # noqa: ARG005
        q_idx + 4 >= kv_idx, torch.tanh(score), -torch.inf
    ),
}


@pytest.mark.parametrize("score_mod", SCORE_MODS.values(), ids=SCORE_MODS)
def test_score_mod_means_what_flex_attention_means(
    score_mod: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # compiling is slow
    output = flex.flex_attention(QUERY, KEY, VALUE, score_mod=score_mod, enable_gqa=True)
    A = regard.attend(QUERY, KEY, score_mod=score_mod)
    torch.testing.assert_close(A @ VALUE, output, **TIGHT)


def test_score_mod_comes_after_the_bias_and_before_softcap_and_mask() -> None:
    bias = torch.tensor([[1.0, 2.0, 3.0]])
    A = regard.attend(
        torch.ones(1, 1),
        torch.ones(3, 1),
        bias=bias,
        score_mod=lambda score, *_: 2 * score,
        softcap=5.0,
        mask=torch.tensor([True, True, False]),
    )
    expected = [5 * math.tanh(4 / 5), 5 * math.tanh(6 / 5), -math.inf]
    assert A.scores[0].tolist() == pytest.approx(expected)


def test_b_counts_through_all_batch_axes() -> None:
    A = regard.attend(
        torch.zeros(2, 3, 4, 1, 1),
        torch.zeros(2, 3, 1, 1, 1),
        score_mod=lambda score, b, h, *_: score + 10 * b + h,
    )
    expected = 10 * torch.arange(6.0).reshape(2, 3, 1) + torch.arange(4.0)
    assert torch.equal(A.scores.to_dense()[..., 0, 0], expected)
    assert A[1, 2].scores[:, 0, 0].tolist() == [50, 51, 52, 53]


def test_b_and_h_are_0_where_the_matrix_has_no_such_axis() -> None:
    A = regard.attend(torch.zeros(1, 1), torch.zeros(1, 1), score_mod=by_place)
    assert A.scores[0].tolist() == [0]


def test_a_gradient_reaches_the_score_through_score_mod() -> None:
    query = QUERY.clone().requires_grad_()
    A = regard.attend(query, KEY, score_mod=lambda score, *_: score.sigmoid(), softcap=2.0)
    (found,) = torch.autograd.grad(A.entropy().sum(), query)
    dense = oracle.attend(query, KEY, score_mod=torch.sigmoid, softcap=2.0)
    (right,) = torch.autograd.grad(oracle.entropy(dense).sum(), query)
    torch.testing.assert_close(found, right, **TIGHT)


def test_score_mod_may_answer_the_same_number_for_every_score() -> None:
    A = regard.attend(QUERY, KEY, score_mod=lambda *_: torch.tensor(3.0), softcap=2.0)
    expected = torch.full((2, 6, 7, 11), 2 * math.tanh(1.5))
    torch.testing.assert_close(A.scores.to_dense(), expected, **TIGHT)
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 6, 7), **TIGHT)


def test_score_mod_may_use_what_requires_a_gradient_where_none_is_wanted() -> None:
    slopes = SLOPES.clone().requires_grad_()
    with torch.no_grad():
        A = regard.attend(QUERY, KEY, score_mod=lambda s, _, h, *__: s * slopes[h])
        torch.testing.assert_close(A.scores[0, 2], (QUERY[0, 2] @ KEY[0, 0].mT) / 2 * SLOPES[2])


# What becomes of them: parts, copies, backends, words.

OPTIONS: dict[str, dict[str, Any]] = {
    "alibi": {"bias": regard.ALiBi(6)},
    "t5": {"bias": regard.T5Bias(TABLE)},
    "score_mod": {"score_mod": by_place},
    "softcap": {"softcap": 2.0},
    "sink_bias": {"sink_bias": LOGITS},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@options
@pytest.mark.parametrize("part", LEADING.values(), ids=LEADING)
def test_a_part_of_the_heads_keeps_what_makes_its_scores(
    part: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    matrix = regard.attend(QUERY, KEY, mask=regard.Causal(), **options)
    torch.testing.assert_close(
        part(matrix).scores.to_dense(), part(matrix.scores.to_dense()), **TIGHT
    )
    torch.testing.assert_close(part(matrix).to_dense(), part(matrix.to_dense()), **TIGHT)


@options
def test_a_matrix_of_another_dtype_is_that_of_the_converted_inputs(options: dict[str, Any]) -> None:
    doubled = regard.attend(QUERY, KEY, **options).to(torch.float64)
    assert doubled.to_dense().dtype == torch.float64
    expected = regard.attend(QUERY, KEY, **options).reduce(
        regard.Output(torch.eye(11)), backend="dense"
    )
    torch.testing.assert_close(doubled.to_dense(), expected.double(), atol=1e-7, rtol=1e-6)


def test_no_gradient_flows_through_a_detached_matrix() -> None:
    A = regard.attend(
        QUERY,
        KEY,
        bias=regard.T5Bias(TABLE.clone().requires_grad_()),
        sink_bias=LOGITS.clone().requires_grad_(),
    )
    assert A.entropy().requires_grad
    assert not A.detach().entropy().requires_grad


@options
def test_the_fused_backend_says_that_it_has_no_such_call(options: dict[str, Any]) -> None:
    A = regard.attend(QUERY, KEY, **options)
    with pytest.raises(ValueError, match="no fused kernel has softcap, score_mod"):
        A.reduce(regard.Output(VALUE), backend="sdpa")


@options
def test_threads_give_the_numbers_of_one_thread(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 16)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    query = QUERY.clone().requires_grad_()

    def answers() -> list[Tensor]:
        entropy = regard.attend(query, KEY, **options).entropy()
        return [entropy, *torch.autograd.grad(entropy.square().sum(), query)]

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = answers()
    torch.set_num_threads(3)
    found = answers()
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


FACTS = {
    "alibi": "bias=ALiBi(6)",
    "t5": "bias=T5Bias(bidirectional=True, max_distance=128)",
    "score_mod": "score_mod=by_place",
    "softcap": "softcap=2",
    "sink_bias": "sink_bias=(1, 6, 1, 1)",
}


@pytest.mark.parametrize("name", FACTS)
def test_the_repr_names_what_makes_the_scores(name: str) -> None:
    A = regard.attend(QUERY, KEY, **OPTIONS[name])
    assert repr(A) == (
        "AttentionMatrix(batch=2, num_heads=6, q_len=7, kv_len=11, dtype=float32, device=cpu, "
        f"scale=0.5, num_kv_heads=2, {FACTS[name]})"
    )


@pytest.mark.parametrize("backend", [None, "dense"], ids=str)
@pytest.mark.parametrize("score", [-1e2, -1e5, -1e9, torch.finfo(torch.float32).min, 3.0, 1e9])
def test_a_logsumexp_far_below_or_above_its_sink_is_exact(
    score: float, backend: str | None
) -> None:
    bias = torch.full((2, 3), score, requires_grad=True)
    sink = torch.tensor(0.7, requires_grad=True)
    A = regard.attend(torch.zeros(2, 1), torch.zeros(3, 1), bias=bias, sink_bias=sink)
    found = A.reduce(regard.LogSumExp(), backend=backend)
    logits = torch.cat((bias, sink.expand(2, 1)), -1).double()
    torch.testing.assert_close(found.double(), logits.logsumexp(-1), rtol=1e-6, atol=0)
    ours, right = (
        torch.autograd.grad(x.sum(), (bias, sink)) for x in (found, logits.logsumexp(-1))
    )
    for actual, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
