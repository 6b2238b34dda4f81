"""Scores of the keys of a cache: those of kvpress's presses, and the mean written out."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
import regard.nn
from regard.analysis.eviction import _FromLast  # the question itself, to ask it beside others
from regard.recording.layers import Queries


def matrix(
    *batch: int, num_heads: int = 4, q_len: int = 5, kv_len: int = 5, **options: Any
) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(*batch, num_heads, q_len, 3, generator=generator)
    key = torch.randn(*batch, 2, kv_len, 3, generator=generator)
    return regard.attend(query, key, **options)


def observed(weights: Tensor) -> Tensor:
    """What kvpress's ObservedAttentionPress computes from weights of 2 key heads."""
    scores = weights.sum(2) / torch.arange(weights.shape[-1], 0, -1)
    return scores.view(weights.shape[0], 2, -1, weights.shape[-1]).mean(2)


def snapkv(weights: Tensor, window: int, kernel_size: int) -> Tensor:
    """What kvpress's SnapKVPress computes from weights of 2 key heads."""
    scores = weights[..., -window:, :-window].mean(-2)
    scores = F.avg_pool1d(scores, kernel_size, padding=kernel_size // 2, stride=1)
    scores = scores.view(weights.shape[0], 2, -1, scores.shape[-1]).mean(2)
    return F.pad(scores, (0, window), value=scores.max().item() + 1)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 3])
def test_without_a_window_keys_have_the_scores_of_observed_attention(batch: int) -> None:
    A = matrix(batch, q_len=150, kv_len=150, mask=regard.Causal())
    scores = regard.exports.to_kvpress(regard.Recording({"a": A}))["a"]
    torch.testing.assert_close(scores, observed(A.to_dense()))


@pytest.mark.parametrize("kernel_size", [1, 5])
@pytest.mark.parametrize("window", [1, 64, 149])
def test_with_a_window_keys_have_the_scores_of_snapkv(window: int, kernel_size: int) -> None:
    A = matrix(2, q_len=150, kv_len=150, mask=regard.Causal())
    scores = regard.exports.to_kvpress(regard.Recording({"a": A}), window, kernel_size=kernel_size)[
        "a"
    ]
    torch.testing.assert_close(scores, snapkv(A.to_dense(), window, kernel_size))


def test_of_the_last_queries_each_key_has_the_mean_of_those_that_see_it() -> None:
    A = matrix(1, q_len=3, kv_len=5, mask=regard.Causal())
    scores = regard.exports.to_kvpress(regard.Recording({"a": A}))["a"]
    received = A.to_dense().sum(-2) / torch.tensor([3, 3, 3, 2, 1])
    torch.testing.assert_close(scores, received.view(1, 2, 2, 5).mean(2))


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(slice(0, 5), id="the first"),
        pytest.param(slice(3, 8), id="those between"),
        pytest.param(slice(8, 11), id="the last"),
    ],
)
@pytest.mark.parametrize("keep", ["qk", [regard.Sum(-2)]], ids=["qk", "answers"])
def test_of_some_queries_each_key_has_the_mean_of_those_that_see_it(kept: slice, keep: Any) -> None:
    layer = regard.nn.SelfAttention(8, num_heads=4, mask=regard.Causal())
    x = torch.randn(1, 11, 8)
    with torch.no_grad(), regard.observe(layer) as whole:
        layer(x)
    with torch.no_grad(), regard.observe(layer, keep=keep, queries=kept) as seen:
        layer(x)
    rows = torch.arange(11)[kept]
    observers = (rows[:, None] >= torch.arange(11)).sum(0)
    mean = whole[0].to_dense()[..., kept, :].sum(-2) / observers.clamp(min=1)
    [scores] = regard.exports.to_kvpress(seen, num_kv_heads=4).values()
    torch.testing.assert_close(scores, mean)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="no mask"),
        pytest.param({"mask": regard.SlidingWindow(2, 1)}, id="a window"),
        pytest.param({"mask": regard.Causal() & regard.Padding(3)}, id="padding"),
        pytest.param({"bias": torch.tensor([0.0, 0.0, -10_000.0, 0.0, 0.0])}, id="a low bias"),
    ],
)
def test_each_key_has_the_mean_of_the_queries_that_the_mask_shows_it_to(
    options: dict[str, Any],
) -> None:
    A = matrix(1, **options)
    weights = A.to_dense()
    received = weights.sum(-2) / (weights > 0).sum(-2).clamp(min=1)
    scores = regard.exports.to_kvpress(regard.Recording({"a": A}))["a"]
    torch.testing.assert_close(scores, received.view(1, 2, 2, 5).mean(2))


def test_scores_of_keys_can_be_differentiated() -> None:
    query = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 5, 3, dtype=torch.float64)

    def first_key(query: Tensor) -> Tensor:
        A = regard.attend(query, key, mask=regard.Causal())
        return regard.exports.to_kvpress(regard.Recording({"a": A}))["a"][..., 0]

    assert torch.autograd.gradcheck(first_key, (query,))


def test_a_window_needs_the_last_query_that_ran() -> None:
    seen = regard.Recording({})
    seen.add("a", matrix(1, q_len=5, kv_len=12), queries=Queries(start=3, ran=12))
    message = (
        "window is 2 and layer 'a' has the queries 3 to 7; the last that ran, 11, must be among "
        "them.\n    Observe the model again with queries=slice(-2, None)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.exports.to_kvpress(seen, 2)


def answers_only(q_len: int = 5) -> regard.Recording:
    A = matrix(1, q_len=q_len, mask=regard.Causal())
    seen = regard.Recording({})
    seen.add("a", None, answers=[(regard.Sum(-2), A.sum(-2))], shape=A.shape)
    return seen


def test_a_window_needs_query_and_key() -> None:
    message = (
        "layer 'a' has answers only, Sum(dim=-2); its query and key were not kept.\n"
        '    Observe the model again with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        regard.exports.to_kvpress(answers_only(), 2, num_kv_heads=2)


def test_answers_alone_do_not_tell_how_many_heads_keys_have() -> None:
    message = (
        "num_kv_heads is None and layer 'a' has answers only; they do not tell how many heads its "
        "keys have.\n    It is num_key_value_heads in a model's config."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.exports.to_kvpress(answers_only())


def test_answers_alone_do_not_tell_which_queries_see_the_keys_of_another_text() -> None:
    message = (
        "layer 'a' has answers only, and as many keys as queries did not run; which queries can "
        'see a key is not known.\n    Observe the model again with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        regard.exports.to_kvpress(answers_only(q_len=3), num_kv_heads=2)


def test_the_last_queries_are_told_apart_in_a_pass_with_other_questions() -> None:
    A = matrix(q_len=7, kv_len=7)
    received, _ = A.reduce(_FromLast(3), regard.Entropy())
    torch.testing.assert_close(received, A.to_dense()[..., -3:, :].sum(-2))


def test_a_window_of_more_queries_than_were_kept_is_an_error() -> None:
    message = (
        "window is 3 and layer 'a' has q_len = 2 and kv_len = 5; there must be so many queries, "
        "and keys before them.\n    Use window=2 or less."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.exports.to_kvpress(regard.Recording({"a": matrix(1, q_len=2)}), 3)


def test_the_last_queries_alone_give_the_same_scores() -> None:
    A = matrix(1, q_len=150, kv_len=150, mask=regard.Causal())
    last = regard.AttentionMatrix.from_weights(A[..., -64:, :])
    whole = regard.exports.to_kvpress(regard.Recording({"a": A}), 64)["a"]
    scores = regard.exports.to_kvpress(regard.Recording({"a": last}), 64, num_kv_heads=2)["a"]
    torch.testing.assert_close(scores, whole)


def test_the_number_of_key_heads_can_be_told() -> None:
    A = matrix(1, mask=regard.Causal())
    one = regard.exports.to_kvpress(regard.Recording({"a": A}), num_kv_heads=1)["a"]
    torch.testing.assert_close(one, observed(A.to_dense()).mean(1, keepdim=True))


def test_given_weights_have_as_many_key_heads_as_heads() -> None:
    given = regard.AttentionMatrix.from_weights(matrix(1, mask=regard.Causal()).to_dense())
    assert regard.exports.to_kvpress(regard.Recording({"a": given}))["a"].shape == (1, 4, 5)


def test_received_attention_that_was_kept_is_enough() -> None:
    A = matrix(1, mask=regard.Causal())
    seen = regard.Recording({})
    seen.add("a", None, answers=[(regard.Sum(-2), A.sum(-2))], shape=A.shape)
    scores = regard.exports.to_kvpress(seen, num_kv_heads=2)["a"]
    torch.testing.assert_close(scores, observed(A.to_dense()))


def test_layers_that_kept_another_answer_alone_have_no_scores() -> None:
    A = matrix(1, mask=regard.Causal())
    seen = regard.Recording({})
    seen.add("a", None, answers=[(regard.Sum(-2), A.sum(-2))], shape=A.shape)
    seen.add("a[0:5]", None, answers=[(regard.Pool(2, 2), A.pool(2, 2))], shape=A.shape)
    assert list(regard.exports.to_kvpress(seen, num_kv_heads=2)) == list(seen.received()) == ["a"]


def test_a_matrix_without_batch_and_heads_has_one_of_each() -> None:
    x = torch.randn(6, 3)
    A = regard.attend(x, x, mask=regard.Causal())
    scores = regard.exports.to_kvpress(regard.Recording({"a": A}), 2)["a"]
    assert scores.shape == (1, 1, 6)
    assert scores[0, 0, 4:].tolist() == pytest.approx([scores[0, 0, :4].max().item() + 1] * 2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        pytest.param(
            {"window": 5},
            "window is 5 and layer 'a' has q_len = 5 and kv_len = 5; there must be so many "
            "queries, and keys before them.\n    Use window=4 or less.",
            id="no key before the window",
        ),
        pytest.param(
            {"window": 0},
            "window is 0; it must be at least 1.\n    Pass for example window=1.",
            id="no window",
        ),
        pytest.param(
            {"window": 2, "kernel_size": 4},
            "kernel_size is 4; it must be odd, so that a key lies in the middle.\n"
            "    SnapKV takes 5.",
            id="an even kernel",
        ),
        pytest.param(
            {"num_kv_heads": 3},
            "num_kv_heads is 3 and layer 'a' has 4 heads; num_heads must be a multiple of it.\n"
            "    It is num_key_value_heads in a model's config.",
            id="heads that cannot share keys",
        ),
    ],
)
def test_what_no_press_can_score_is_an_error(asked: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.exports.to_kvpress(regard.Recording({"a": matrix(1)}), **asked)
