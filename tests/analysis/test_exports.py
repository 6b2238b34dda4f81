"""What was seen in the form that each other tool takes, equal to the dense weights."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.recording.layers import Origin

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
    form = regard.exports.to_bertviz(seen)
    assert sorted(form) == ["attention", "tokens"]
    assert form["tokens"] == list(TEXTS)
    assert isinstance(form["attention"], tuple)
    for weights, layer in zip(form["attention"], seen.values(), strict=True):
        assert weights.shape == (1, 4, 5, 5)
        assert torch.equal(weights, layer.to_dense())


def test_bertviz_gets_attention_to_another_text_as_cross_attention() -> None:
    seen = cross()
    form = regard.exports.to_bertviz(seen)
    assert sorted(form) == ["cross_attention", "decoder_tokens", "encoder_tokens"]
    assert form["decoder_tokens"] == ["Ja", "."]
    assert form["encoder_tokens"] == list(TEXTS)
    assert torch.equal(form["cross_attention"][0], seen[0].to_dense())


def test_bertviz_gets_another_text_of_the_same_length_as_cross_attention() -> None:
    seen = regard.Recording(
        {"cross": matrix(1)}, query_tokens=map(Token, "abcde"), key_tokens=map(Token, TEXTS)
    )
    assert regard.exports.to_bertviz(seen)["decoder_tokens"] == list("abcde")


def test_a_matrix_without_batch_has_a_batch_of_one_there() -> None:
    seen = regard.Recording({"a": matrix()}, query_tokens=map(Token, TEXTS))
    assert regard.exports.to_bertviz(seen)["attention"][0].shape == (1, 4, 5, 5)


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
    assert torch.equal(regard.exports.patterns(seen)[key], seen["b"].to_dense())
    assert key in regard.exports.patterns(seen)


def test_patterns_are_a_mapping_of_hooks() -> None:
    cache = regard.exports.patterns(recording())
    assert list(cache) == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    assert len(cache) == 2
    assert [weights.shape for weights in cache.values()] == [(1, 4, 5, 5)] * 2


def test_patterns_of_a_batch_keep_it() -> None:
    seen = regard.Recording({"a": matrix(3)})
    assert torch.equal(regard.exports.patterns(seen)["pattern", 0], seen["a"].to_dense())


def test_a_matrix_without_heads_is_one_head() -> None:
    A = regard.attend(torch.zeros(4, 2), torch.zeros(4, 2))
    assert regard.exports.patterns(regard.Recording({"a": A}))["pattern", 0].shape == (1, 1, 4, 4)


def test_patterns_show_how_to_ask() -> None:
    assert (
        repr(regard.exports.patterns(recording()))
        == 'Patterns(of 2 layers: cache["pattern", layer])'
    )


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
    cache = regard.exports.patterns(recording())
    assert key not in cache
    with pytest.raises(KeyError) as caught:
        cache[key]
    assert caught.value.args == (
        f"key is {key!r}; there are patterns of the layers 0, 1, "
        'as cache["pattern", layer] and cache["blocks.0.attn.hook_pattern"]',
    )


def of_places(*places: int) -> regard.Recording:
    """Layers of a model of which some were observed."""
    seen = regard.Recording({})
    for place in places:
        seen.add(f"layer.{place}", matrix(1, seed=place), origin=Origin(place))
    return seen


def test_a_pattern_has_the_place_of_its_layer_in_the_model() -> None:
    seen = of_places(3, 5)
    cache = regard.exports.patterns(seen)
    assert list(cache) == ["blocks.3.attn.hook_pattern", "blocks.5.attn.hook_pattern"]
    assert torch.equal(cache["pattern", 5], seen["layer.5"].to_dense())
    assert torch.equal(cache["pattern", -2], seen["layer.3"].to_dense())
    assert ("pattern", 0) not in cache


def test_a_layer_that_ran_twice_has_no_name_of_its_own() -> None:
    seen = of_places(3)
    seen.add("layer.3", matrix(1), origin=Origin(3))
    message = (
        "layers 'layer.3' and 'layer.3#2' are both the layer 3 of the model; TransformerLens has "
        "one name for each.\n    Ask for them apart, regard.exports.patterns(seen.part(names))."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.exports.patterns(seen)
    assert list(regard.exports.patterns(seen.part(["layer.3#2"]))) == ["blocks.3.attn.hook_pattern"]


# CircuitsVis and attnview


def test_circuitsvis_gets_one_layer_without_its_batch() -> None:
    seen = recording()
    form = regard.exports.to_circuitsvis(seen, "b")
    assert sorted(form) == ["attention", "tokens"]
    assert torch.equal(form["attention"], seen["b"].to_dense()[0])
    assert form["tokens"] == list(TEXTS)


def test_attnview_gets_the_tokens_of_both_sides() -> None:
    seen = cross()
    form = regard.exports.to_attnview(seen, 0)
    assert sorted(form) == ["attention", "key_tokens", "query_tokens"]
    assert torch.equal(form["attention"], seen[0].to_dense()[0])
    assert (form["query_tokens"], form["key_tokens"]) == (["Ja", "."], list(TEXTS))


def test_circuitsvis_has_no_place_for_another_text() -> None:
    message = (
        "query_tokens and key_tokens differ; CircuitsVis shows a text that attends to itself.\n"
        "    Use to_attnview(layer), or to_bertviz()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.exports.to_circuitsvis(cross(), 0)


# NumPy


def test_numpy_gets_every_layer_by_name() -> None:
    seen = recording()
    arrays = regard.exports.to_numpy(seen)
    assert list(arrays) == ["a", "b"]
    assert torch.equal(torch.from_numpy(arrays["b"]), seen["b"].to_dense())


def test_numpy_gets_bfloat16_as_float32() -> None:
    A = matrix(1).to(torch.bfloat16)
    array = regard.exports.to_numpy(regard.Recording({"a": A}))["a"]
    assert array.dtype == "float32"
    assert torch.equal(torch.from_numpy(array), A.to_dense().float())


def test_numpy_counts_the_bytes_of_the_float32_that_it_gets() -> None:
    seen = regard.Recording({"a": matrix(1).to(torch.bfloat16)})
    with pytest.raises(MemoryError, match=r"^to_numpy\(\) would make \(400,\) uint8"):
        regard.exports.to_numpy(seen, limit=399)
    assert regard.exports.to_numpy(seen, limit=400)["a"].nbytes == 400


def test_numpy_gets_no_gradients() -> None:
    x = torch.randn(1, 2, 3, requires_grad=True)
    array = regard.exports.to_numpy(regard.Recording({"a": regard.attend(x, x)}))["a"]
    assert array.shape == (1, 2, 2)


def test_numpy_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    message = "to_numpy() needs numpy, which is not installed.\n    Run: pip install numpy"
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        regard.exports.to_numpy(recording())


# Dense forms state their size

Ask = Callable[[regard.Recording, int | None], object]
DENSE: list[Any] = [
    pytest.param(
        lambda seen, limit: regard.exports.to_bertviz(seen, limit=limit),
        "to_bertviz()",
        "(2, 4, 5, 5) float32 = 800 bytes",
        799,
        id="bertviz",
    ),
    pytest.param(
        lambda seen, limit: regard.exports.to_circuitsvis(seen, 0, limit=limit),
        "to_circuitsvis()",
        "(1, 4, 5, 5) float32 = 400 bytes",
        399,
        id="circuitsvis",
    ),
    pytest.param(
        lambda seen, limit: regard.exports.to_attnview(seen, 0, limit=limit),
        "to_attnview()",
        "(1, 4, 5, 5) float32 = 400 bytes",
        399,
        id="attnview",
    ),
    pytest.param(
        lambda seen, limit: regard.exports.patterns(seen, limit=limit)["pattern", 0],
        'cache["pattern", layer]',
        "(1, 4, 5, 5) float32 = 400 bytes",
        399,
        id="patterns",
    ),
    pytest.param(
        lambda seen, limit: regard.exports.to_numpy(seen, limit=limit),
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


@pytest.mark.parametrize("limit", ["4GB", 4e9, True], ids=["text", "float", "bool"])
def test_a_limit_is_a_whole_number_of_bytes(limit: Any) -> None:
    kind = {"4GB": "a str", 4e9: "a float", True: "a bool"}[limit]
    message = (
        f"limit is {kind}; it must be a whole number of bytes, or None.\n"
        "    Pass for example limit=8 * 2**30."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        regard.exports.to_numpy(recording(), limit=limit)


def test_without_being_told_the_limit_is_that_of_to_dense() -> None:
    x = torch.zeros(1, 1, 40_000, 1)
    seen = regard.Recording({"a": regard.attend(x, x)})
    with pytest.raises(MemoryError, match=r"= 6\.0 GiB; the limit is 4\.0 GiB"):
        regard.exports.patterns(seen)["pattern", 0]


# What has no such form


@pytest.mark.parametrize(
    ("ask", "call"),
    [
        pytest.param(regard.exports.to_bertviz, "to_bertviz()", id="bertviz"),
        pytest.param(
            lambda seen: regard.exports.to_circuitsvis(seen, 0),
            "to_circuitsvis()",
            id="circuitsvis",
        ),
        pytest.param(
            lambda seen: regard.exports.to_attnview(seen, 0), "to_attnview()", id="attnview"
        ),
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
        pytest.param(regard.exports.to_bertviz, "to_bertviz()", id="bertviz"),
        pytest.param(
            lambda seen: regard.exports.to_attnview(seen, 0), "to_attnview()", id="attnview"
        ),
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
        "must be equal.\n    Ask for them apart, regard.exports.to_bertviz(seen.part(names))."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.exports.to_bertviz(seen)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(regard.exports.to_bertviz, id="bertviz"),
        pytest.param(lambda seen: regard.exports.to_attnview(seen, "a"), id="attnview"),
        pytest.param(lambda seen: regard.exports.patterns(seen)["pattern", 0], id="patterns"),
        pytest.param(regard.exports.to_numpy, id="numpy"),
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
