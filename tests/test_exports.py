"""What was seen in the form that each other tool takes, equal to the dense weights."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
import regard.nn
from regard.eviction import _FromLast  # the question itself, to ask it beside others
from regard.layers import Queries

Token = regard.Token
TEXTS = ("Life", " is", " short", ".", " Eat")


def matrix(
    *batch: int, num_heads: int = 4, q_len: int = 5, kv_len: int = 5, seed: int = 0, **options: Any
) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(*batch, num_heads, q_len, 3, generator=generator)
    key = torch.randn(*batch, 2, kv_len, 3, generator=generator)
    return regard.attend(query, key, **options)


def recording(**options: Any) -> regard.Recording:
    layers = {name: matrix(1, seed=seed, **options) for seed, name in enumerate(("a", "b"))}
    return regard.Recording(layers, query_tokens=map(Token, TEXTS))


def cross() -> regard.Recording:
    """Two queries of one text, five keys of another."""
    return regard.Recording(
        {"cross": matrix(1, q_len=2)},
        query_tokens=[Token("Ja"), Token(".")],
        key_tokens=map(Token, TEXTS),
    )


# BertViz


def test_bertviz_gets_the_weights_of_every_layer_and_the_tokens() -> None:
    seen = recording()
    form = seen.to_bertviz()
    assert sorted(form) == ["attention", "tokens"]
    assert form["tokens"] == list(TEXTS)
    assert isinstance(form["attention"], tuple)
    for weights, layer in zip(form["attention"], seen.values(), strict=True):
        assert weights.shape == (1, 4, 5, 5)
        assert torch.equal(weights, layer.to_dense())


def test_bertviz_gets_attention_to_another_text_as_cross_attention() -> None:
    seen = cross()
    form = seen.to_bertviz()
    assert sorted(form) == ["cross_attention", "decoder_tokens", "encoder_tokens"]
    assert form["decoder_tokens"] == ["Ja", "."]
    assert form["encoder_tokens"] == list(TEXTS)
    assert torch.equal(form["cross_attention"][0], seen[0].to_dense())


def test_bertviz_gets_another_text_of_the_same_length_as_cross_attention() -> None:
    seen = regard.Recording(
        {"cross": matrix(1)}, query_tokens=map(Token, "abcde"), key_tokens=map(Token, TEXTS)
    )
    assert seen.to_bertviz()["decoder_tokens"] == list("abcde")


def test_a_matrix_without_batch_has_a_batch_of_one_there() -> None:
    seen = regard.Recording({"a": matrix()}, query_tokens=map(Token, TEXTS))
    assert seen.to_bertviz()["attention"][0].shape == (1, 4, 5, 5)


# TransformerLens


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(("pattern", 1), id="short"),
        pytest.param(("pattern", -1), id="from the end"),
        pytest.param(("pattern", 1, "attn"), id="with its kind of layer"),
        pytest.param("blocks.1.attn.hook_pattern", id="name of the hook"),
    ],
)
def test_a_pattern_has_the_name_that_transformerlens_gives_it(key: Any) -> None:
    seen = recording()
    assert torch.equal(seen.patterns()[key], seen["b"].to_dense())
    assert key in seen.patterns()


def test_patterns_are_a_mapping_of_hooks() -> None:
    cache = recording().patterns()
    assert list(cache) == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    assert len(cache) == 2
    assert [weights.shape for weights in cache.values()] == [(1, 4, 5, 5)] * 2


def test_patterns_of_a_batch_keep_it() -> None:
    seen = regard.Recording({"a": matrix(3)})
    assert torch.equal(seen.patterns()["pattern", 0], seen["a"].to_dense())


def test_a_matrix_without_heads_is_one_head() -> None:
    A = regard.attend(torch.zeros(4, 2), torch.zeros(4, 2))
    assert regard.Recording({"a": A}).patterns()["pattern", 0].shape == (1, 1, 4, 4)


def test_patterns_show_how_to_ask() -> None:
    assert repr(recording().patterns()) == 'Patterns(of 2 layers: cache["pattern", layer])'


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(("pattern", 2), id="no such layer"),
        pytest.param(("pattern", -3), id="no such layer from the end"),
        pytest.param(("pattern",), id="no layer"),
        pytest.param(("q", 0), id="another activation"),
        pytest.param(("pattern", "a"), id="a layer by name"),
        pytest.param("blocks.0.attn.hook_q", id="another hook"),
        pytest.param("blocks.2.attn.hook_pattern", id="a hook of no layer"),
        pytest.param(0, id="a place"),
    ],
)
def test_an_unknown_pattern_tells_those_that_are_known(key: Any) -> None:
    cache = recording().patterns()
    assert key not in cache
    with pytest.raises(KeyError) as caught:
        cache[key]
    assert caught.value.args == (
        f"key is {key!r}; there are patterns of 2 layers, "
        'cache["pattern", layer] and cache["blocks.0.attn.hook_pattern"]',
    )


# CircuitsVis and attnview


def test_circuitsvis_gets_one_layer_without_its_batch() -> None:
    seen = recording()
    form = seen.to_circuitsvis("b")
    assert sorted(form) == ["attention", "tokens"]
    assert torch.equal(form["attention"], seen["b"].to_dense()[0])
    assert form["tokens"] == list(TEXTS)


def test_attnview_gets_the_tokens_of_both_sides() -> None:
    seen = cross()
    form = seen.to_attnview(0)
    assert sorted(form) == ["attention", "key_tokens", "query_tokens"]
    assert torch.equal(form["attention"], seen[0].to_dense()[0])
    assert (form["query_tokens"], form["key_tokens"]) == (["Ja", "."], list(TEXTS))


def test_circuitsvis_has_no_place_for_another_text() -> None:
    message = (
        "query_tokens and key_tokens differ; CircuitsVis shows a text that attends to itself.\n"
        "    Use to_attnview(layer), or to_bertviz()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cross().to_circuitsvis(0)


# NumPy


def test_numpy_gets_every_layer_by_name() -> None:
    seen = recording()
    arrays = seen.to_numpy()
    assert list(arrays) == ["a", "b"]
    assert torch.equal(torch.from_numpy(arrays["b"]), seen["b"].to_dense())


def test_numpy_gets_bfloat16_as_float32() -> None:
    A = matrix(1).to(torch.bfloat16)
    array = regard.Recording({"a": A}).to_numpy()["a"]
    assert array.dtype == "float32"
    assert torch.equal(torch.from_numpy(array), A.to_dense().float())


def test_numpy_gets_no_gradients() -> None:
    x = torch.randn(1, 2, 3, requires_grad=True)
    array = regard.Recording({"a": regard.attend(x, x)}).to_numpy()["a"]
    assert array.shape == (1, 2, 2)


def test_numpy_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    message = "to_numpy() needs numpy, which is not installed.\n    Run: pip install numpy"
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        recording().to_numpy()


# kvpress


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


@pytest.mark.parametrize("batch", [1, 3])
def test_without_a_window_keys_have_the_scores_of_observed_attention(batch: int) -> None:
    A = matrix(batch, q_len=150, kv_len=150, mask=regard.Causal())
    scores = regard.Recording({"a": A}).to_kvpress()["a"]
    torch.testing.assert_close(scores, observed(A.to_dense()))


@pytest.mark.parametrize("kernel_size", [1, 5])
@pytest.mark.parametrize("window", [1, 64, 149])
def test_with_a_window_keys_have_the_scores_of_snapkv(window: int, kernel_size: int) -> None:
    A = matrix(2, q_len=150, kv_len=150, mask=regard.Causal())
    scores = regard.Recording({"a": A}).to_kvpress(window, kernel_size=kernel_size)["a"]
    torch.testing.assert_close(scores, snapkv(A.to_dense(), window, kernel_size))


def test_of_the_last_queries_each_key_has_the_mean_of_those_that_see_it() -> None:
    A = matrix(1, q_len=3, kv_len=5, mask=regard.Causal())
    scores = regard.Recording({"a": A}).to_kvpress()["a"]
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
    [scores] = seen.to_kvpress(num_kv_heads=4).values()
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
    scores = regard.Recording({"a": A}).to_kvpress()["a"]
    torch.testing.assert_close(scores, received.view(1, 2, 2, 5).mean(2))


def test_scores_of_keys_can_be_differentiated() -> None:
    query = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 5, 3, dtype=torch.float64)

    def first_key(query: Tensor) -> Tensor:
        A = regard.attend(query, key, mask=regard.Causal())
        return regard.Recording({"a": A}).to_kvpress()["a"][..., 0]

    assert torch.autograd.gradcheck(first_key, (query,))


def test_a_window_needs_the_last_query_that_ran() -> None:
    seen = regard.Recording({})
    seen.add("a", matrix(1, q_len=5, kv_len=12), queries=Queries(start=3, ran=12))
    message = (
        "window is 2 and layer 'a' has the queries 3 to 7; the last that ran, 11, must be among "
        "them.\n    Observe the model again with queries=slice(-2, None)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        seen.to_kvpress(2)


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
        answers_only().to_kvpress(2, num_kv_heads=2)


def test_answers_alone_do_not_tell_how_many_heads_keys_have() -> None:
    message = (
        "num_kv_heads is None and layer 'a' has answers only; they do not tell how many heads its "
        "keys have.\n    It is num_key_value_heads in a model's config."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        answers_only().to_kvpress()


def test_answers_alone_do_not_tell_which_queries_see_the_keys_of_another_text() -> None:
    message = (
        "layer 'a' has answers only, and as many keys as queries did not run; which queries can "
        'see a key is not known.\n    Observe the model again with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        answers_only(q_len=3).to_kvpress(num_kv_heads=2)


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
        regard.Recording({"a": matrix(1, q_len=2)}).to_kvpress(3)


def test_the_last_queries_alone_give_the_same_scores() -> None:
    A = matrix(1, q_len=150, kv_len=150, mask=regard.Causal())
    last = regard.AttentionMatrix.from_weights(A[..., -64:, :])
    whole = regard.Recording({"a": A}).to_kvpress(64)["a"]
    scores = regard.Recording({"a": last}).to_kvpress(64, num_kv_heads=2)["a"]
    torch.testing.assert_close(scores, whole)


def test_the_number_of_key_heads_can_be_told() -> None:
    A = matrix(1, mask=regard.Causal())
    one = regard.Recording({"a": A}).to_kvpress(num_kv_heads=1)["a"]
    torch.testing.assert_close(one, observed(A.to_dense()).mean(1, keepdim=True))


def test_given_weights_have_as_many_key_heads_as_heads() -> None:
    given = regard.AttentionMatrix.from_weights(matrix(1, mask=regard.Causal()).to_dense())
    assert regard.Recording({"a": given}).to_kvpress()["a"].shape == (1, 4, 5)


def test_received_attention_that_was_kept_is_enough() -> None:
    A = matrix(1, mask=regard.Causal())
    seen = regard.Recording({})
    seen.add("a", None, answers=[(regard.Sum(-2), A.sum(-2))], shape=A.shape)
    scores = seen.to_kvpress(num_kv_heads=2)["a"]
    torch.testing.assert_close(scores, observed(A.to_dense()))


def test_a_matrix_without_batch_and_heads_has_one_of_each() -> None:
    x = torch.randn(6, 3)
    A = regard.attend(x, x, mask=regard.Causal())
    scores = regard.Recording({"a": A}).to_kvpress(2)["a"]
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
        recording().to_kvpress(**asked)


# Dense forms state their size

Ask = Callable[[regard.Recording, int | None], object]
DENSE: list[Any] = [
    pytest.param(
        lambda seen, limit: seen.to_bertviz(limit=limit),
        "to_bertviz()",
        "(2, 4, 5, 5) float32 = 800 bytes",
        799,
        id="bertviz",
    ),
    pytest.param(
        lambda seen, limit: seen.to_circuitsvis(0, limit=limit),
        "to_circuitsvis()",
        "(1, 4, 5, 5) float32 = 400 bytes",
        399,
        id="circuitsvis",
    ),
    pytest.param(
        lambda seen, limit: seen.to_attnview(0, limit=limit),
        "to_attnview()",
        "(1, 4, 5, 5) float32 = 400 bytes",
        399,
        id="attnview",
    ),
    pytest.param(
        lambda seen, limit: seen.patterns(limit=limit)["pattern", 0],
        'cache["pattern", layer]',
        "(1, 4, 5, 5) float32 = 400 bytes",
        399,
        id="patterns",
    ),
    pytest.param(
        lambda seen, limit: seen.to_numpy(limit=limit),
        "to_numpy()",
        "(800,) uint8 = 800 bytes",
        799,
        id="numpy",
    ),
]


@pytest.mark.parametrize(("ask", "call", "size", "limit"), DENSE)
def test_what_would_be_too_large_is_an_error(ask: Ask, call: str, size: str, limit: int) -> None:
    door = "patterns()" if call.startswith("cache") else call
    message = (
        f"{call} would make {size}; the limit is {limit} bytes.\n"
        "    Ask for a part, seen[3][..., rows, cols], or for a summary, seen.pool(512, 512), "
        f"or pass limit=None to {door}."
    )
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}$"):
        ask(recording(), limit)


@pytest.mark.parametrize(("ask", "call", "size", "limit"), DENSE)
@pytest.mark.parametrize("given", ["just enough", "none"])
def test_what_is_within_the_limit_is_made(
    ask: Ask, call: str, size: str, limit: int, given: str
) -> None:
    ask(recording(), limit + 1 if given == "just enough" else None)


def test_without_being_told_the_limit_is_that_of_to_dense() -> None:
    x = torch.zeros(1, 1, 40_000, 1)
    seen = regard.Recording({"a": regard.attend(x, x)})
    with pytest.raises(MemoryError, match=r"= 6\.0 GiB; the limit is 4\.0 GiB"):
        seen.patterns()["pattern", 0]


# What has no such form


@pytest.mark.parametrize(
    ("ask", "call"),
    [
        pytest.param(lambda seen: seen.to_bertviz(), "to_bertviz()", id="bertviz"),
        pytest.param(lambda seen: seen.to_circuitsvis(0), "to_circuitsvis()", id="circuitsvis"),
        pytest.param(lambda seen: seen.to_attnview(0), "to_attnview()", id="attnview"),
    ],
)
def test_views_need_tokens(ask: Any, call: str) -> None:
    message = (
        f"this recording has no tokens; {call} needs one for each position.\n"
        "    Use seen.with_tokens([regard.Token(text) for text in texts])."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ask(regard.Recording({"a": matrix(1)}))


@pytest.mark.parametrize(
    ("ask", "call"),
    [
        pytest.param(lambda seen: seen.to_bertviz(), "to_bertviz()", id="bertviz"),
        pytest.param(lambda seen: seen.to_attnview(0), "to_attnview()", id="attnview"),
    ],
)
def test_views_show_one_text(ask: Any, call: str) -> None:
    message = (
        f"layer 'a' has shape (3, 4, 5, 5); {call} looks at one text, a batch of 1.\n"
        "    Take one of them, seen.entry(0)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ask(regard.Recording({"a": matrix(3)}, query_tokens=map(Token, TEXTS)))


def test_a_view_of_all_layers_needs_layers_of_one_shape() -> None:
    seen = regard.Recording({"a": matrix(1), "b": matrix(1, q_len=4)})
    message = (
        "layer 'b' has shape (1, 4, 4, 5) and 'a' has (1, 4, 5, 5); num_heads, q_len and kv_len "
        "must be equal.\n    Ask for them apart, seen.part(names).to_bertviz()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        seen.to_bertviz()


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda seen: seen.to_bertviz(), id="bertviz"),
        pytest.param(lambda seen: seen.to_attnview("a"), id="attnview"),
        pytest.param(lambda seen: seen.patterns()["pattern", 0], id="patterns"),
        pytest.param(lambda seen: seen.to_numpy(), id="numpy"),
    ],
)
def test_a_matrix_that_was_not_kept_has_no_dense_form(ask: Any) -> None:
    seen = regard.Recording({}, query_tokens=map(Token, TEXTS))
    seen.add("a", None, shape=torch.Size([1, 4, 5, 5]))
    message = (
        "layer 'a' has answers only, no answers; its query and key were not kept.\n"
        '    Observe the model again with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        ask(seen)
