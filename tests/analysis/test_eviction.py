"""Scores of the keys of a cache: those of kvpress's presses, and the mean written out."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
import regard.nn
from regard.recording.layers import Queries

to_kvpress = regard.exports.to_kvpress


def matrix(
    *batch: int, num_heads: int = 4, q_len: int = 5, kv_len: int = 5, **options: Any
) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(*batch, num_heads, q_len, 3, generator=generator)
    key = torch.randn(*batch, 2, kv_len, 3, generator=generator)
    return regard.attend(query, key, **options)


def scores_of(A: regard.AttentionMatrix, window: int | None = None, **options: Any) -> Tensor:
    return to_kvpress(regard.Recording({"a": A}), window, **options)["a"]


def answers_only(q_len: int = 5) -> regard.Recording:
    A = matrix(1, q_len=q_len, mask=regard.Causal())
    seen = regard.Recording({})
    seen.add("a", None, answers=[(regard.Sum(-2), A.sum(-2))], shape=A.shape)
    return seen


def grouped(scores: Tensor) -> Tensor:
    """The mean over the 2 heads that share each of 2 keys."""
    return scores.view(scores.shape[0], 2, -1, scores.shape[-1]).mean(2)


def observed(weights: Tensor) -> Tensor:
    """Return what kvpress's ObservedAttentionPress computes from weights of 2 key heads."""
    return grouped(weights.sum(2) / torch.arange(weights.shape[-1], 0, -1))


def snapkv(weights: Tensor, window: int, kernel_size: int) -> Tensor:
    """Return what kvpress's SnapKVPress computes from weights of 2 key heads."""
    scores = weights[..., -window:, :-window].mean(-2)
    scores = grouped(F.avg_pool1d(scores, kernel_size, padding=kernel_size // 2, stride=1))
    return F.pad(scores, (0, window), value=scores.max().item() + 1)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 3])
def test_without_a_window_keys_have_the_scores_of_observed_attention(batch: int) -> None:
    A = matrix(batch, q_len=150, kv_len=150, mask=regard.Causal())
    torch.testing.assert_close(scores_of(A), observed(A.to_dense()))


@pytest.mark.parametrize("kernel_size", [1, 5])
@pytest.mark.parametrize("window", [1, 64, 149])
def test_with_a_window_keys_have_the_scores_of_snapkv(window: int, kernel_size: int) -> None:
    A = matrix(2, q_len=150, kv_len=150, mask=regard.Causal())
    scores = scores_of(A, window, kernel_size=kernel_size)
    torch.testing.assert_close(scores, snapkv(A.to_dense(), window, kernel_size))
    last = regard.AttentionMatrix.from_weights(A[..., -window:, :])
    of_last = scores_of(last, window, kernel_size=kernel_size, num_kv_heads=2)
    torch.testing.assert_close(of_last, scores)


@pytest.mark.parametrize("queries", [slice(0, 5), slice(3, 8), slice(8, 11)], ids=str)
@pytest.mark.parametrize("keep", ["qk", [regard.Sum(-2)]], ids=["qk", "answers"])
def test_of_some_queries_each_key_has_the_mean_of_those_that_see_it(
    queries: slice, keep: Any
) -> None:
    layer = regard.nn.SelfAttention(8, num_heads=4, mask=regard.Causal())
    x = torch.randn(1, 11, 8)
    with torch.no_grad(), regard.observe(layer) as whole:
        layer(x)
    with torch.no_grad(), regard.observe(layer, keep=keep, queries=queries) as seen:
        layer(x)
    rows = torch.arange(11)[queries]
    observers = (rows[:, None] >= torch.arange(11)).sum(0)
    mean = whole[0].to_dense()[..., queries, :].sum(-2) / observers.clamp(min=1)
    [scores] = to_kvpress(seen, num_kv_heads=4).values()
    torch.testing.assert_close(scores, mean)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="no mask"),
        pytest.param({"q_len": 3, "mask": regard.Causal()}, id="the last queries"),
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
    torch.testing.assert_close(scores_of(A), grouped(received))


def test_scores_of_keys_can_be_differentiated() -> None:
    query = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 5, 3, dtype=torch.float64)

    def first_key(query: Tensor, window: int | None) -> Tensor:
        return scores_of(regard.attend(query, key, mask=regard.Causal()), window)[..., 0]

    assert torch.autograd.gradcheck(first_key, (query, None))
    assert torch.autograd.gradcheck(first_key, (query, 2))


def test_the_number_of_key_heads_can_be_given() -> None:
    A = matrix(1, mask=regard.Causal())
    one = scores_of(A, num_kv_heads=1)
    torch.testing.assert_close(one, observed(A.to_dense()).mean(1, keepdim=True))
    weights = regard.AttentionMatrix.from_weights(A.to_dense())
    assert scores_of(weights).shape == (1, 4, 5)  # given weights have as many as heads


def test_received_attention_that_was_kept_is_enough() -> None:
    seen = answers_only()
    A = matrix(1, mask=regard.Causal())
    seen.add("a[0:5]", None, answers=[(regard.Pool(2, 2), A.pool(2, 2))], shape=A.shape)
    scores = to_kvpress(seen, num_kv_heads=2)
    assert list(scores) == list(seen.received()) == ["a"]  # the other layer has another answer
    torch.testing.assert_close(scores["a"], observed(A.to_dense()))


def test_a_matrix_without_batch_and_heads_has_one_of_each() -> None:
    x = torch.randn(6, 3)
    scores = scores_of(regard.attend(x, x, mask=regard.Causal()), 2)
    assert scores.shape == (1, 1, 6)
    assert scores[0, 0, 4:].tolist() == pytest.approx([scores[0, 0, :4].max().item() + 1] * 2)


def of_queries(start: int, ran: int) -> regard.Recording:
    seen = regard.Recording({})
    seen.add("a", matrix(1, kv_len=12), queries=Queries(start=start, ran=ran))
    return seen


ONE = regard.Recording({"a": matrix(1)})
SO_MANY = "there must be so many queries, and keys before them.\n    Use window={} or less."
CONFIG = "\n    It is num_key_value_heads in a model's config."


UNSCORED = {
    "the last queries were not kept": (
        of_queries(3, 12),
        {"window": 2},
        "window is 2 and layer 'a' has the queries 3 to 7; the last that ran, 11, must be "
        "among them.\n    Observe the model again with queries=slice(-2, None).",
    ),
    "a window of answers": (
        answers_only(),
        {"window": 2, "num_kv_heads": 2},
        "layer 'a' has answers only, Sum(dim=-2); its query and key were not kept.\n"
        '    Observe the model again with keep="qk".',
    ),
    "answers without key heads": (
        answers_only(),
        {},
        f"num_kv_heads is None; it must be given where layer 'a' has answers only.{CONFIG}",
    ),
    "answers about another text": (
        answers_only(q_len=3),
        {"num_kv_heads": 2},
        "layer 'a' has answers only, and as many keys as queries did not run; which queries "
        'can see a key is not known.\n    Observe the model again with keep="qk".',
    ),
    "more queries than were kept": (
        regard.Recording({"a": matrix(1, q_len=2)}),
        {"window": 3},
        f"window is 3 and layer 'a' has q_len = 2 and kv_len = 5; {SO_MANY.format(2)}",
    ),
    "no key before the window": (
        ONE,
        {"window": 5},
        f"window is 5 and layer 'a' has q_len = 5 and kv_len = 5; {SO_MANY.format(4)}",
    ),
    "an even kernel": (
        ONE,
        {"window": 2, "kernel_size": 4},
        "kernel_size is 4; it must be odd, so that a key lies in the middle.\n    SnapKV takes 5.",
    ),
    "heads that cannot share keys": (
        ONE,
        {"num_kv_heads": 3},
        "num_kv_heads is 3 and layer 'a' has 4 heads; num_heads must be a multiple of it." + CONFIG,
    ),
}


@pytest.mark.parametrize(("seen", "asked", "message"), UNSCORED.values(), ids=UNSCORED)
def test_what_no_press_can_score_is_an_error(
    seen: regard.Recording, asked: dict[str, int], message: str
) -> None:
    with pytest.raises((ValueError, regard.RegardError), match=f"^{re.escape(message)}$"):
        to_kvpress(seen, **asked)
