"""Recordings in the form that each other tool takes, equal to the dense weights."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.analysis.exports import patterns, to_bertviz, to_circuitsvis, to_numpy
from regard.recording.layers import Origin

TEXTS = ("Life", " is", " short", ".", " Eat")


def matrix(
    *batch: int, num_heads: int = 4, q_len: int = 5, kv_len: int = 5, seed: int = 0
) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(*batch, num_heads, q_len, 3, generator=generator)
    return regard.attend(query, torch.randn(*batch, 2, kv_len, 3, generator=generator))


def recording() -> regard.Recording:
    return regard.Recording({"a": matrix(1), "b": matrix(1, seed=1)}).with_tokens(TEXTS)


def of_places(*places: int) -> regard.Recording:
    """Layers of a model of which some were observed."""
    seen = regard.Recording({})
    for place in places:
        seen.add(f"layer.{place}", matrix(1, seed=place), origin=Origin(place))
    return seen


# BertViz


def test_bertviz_gets_the_weights_of_every_layer_and_the_tokens() -> None:
    seen = recording()
    form = to_bertviz(seen)
    assert sorted(form) == ["attention", "tokens"]
    assert form["tokens"] == list(TEXTS)
    assert isinstance(form["attention"], tuple)
    for weights, layer in zip(form["attention"], seen.values(), strict=True):
        assert weights.shape == (1, 4, 5, 5)
        assert torch.equal(weights, layer.to_dense())


@pytest.mark.parametrize("queries", [("Ja", "."), tuple("abcde")], ids=["shorter", "as long"])
def test_bertviz_gets_another_text_as_cross_attention(queries: tuple[str, ...]) -> None:
    seen = regard.Recording({"a": matrix(1, q_len=len(queries))}).with_tokens(queries, TEXTS)
    form = to_bertviz(seen)
    assert sorted(form) == ["cross_attention", "decoder_tokens", "encoder_tokens"]
    assert (form["decoder_tokens"], form["encoder_tokens"]) == (list(queries), list(TEXTS))
    assert torch.equal(form["cross_attention"][0], seen[0].to_dense())


def test_a_matrix_without_batch_has_a_batch_of_one_there() -> None:
    seen = regard.Recording({"a": matrix()}).with_tokens(TEXTS)
    assert to_bertviz(seen)["attention"][0].shape == (1, 4, 5, 5)


# TransformerLens


@pytest.mark.parametrize(
    "key",
    [("pattern", 5), ("pattern", -1), ("pattern", 5, "attn"), "blocks.5.attn.hook_pattern"],
    ids=str,
)
def test_a_pattern_has_the_name_that_transformerlens_gives_it(key: Any) -> None:
    seen = of_places(3, 5)
    assert torch.equal(patterns(seen)[key], seen["layer.5"].to_dense())
    assert key in patterns(seen)


def test_patterns_are_a_mapping_of_hooks() -> None:
    cache = patterns(of_places(3, 5))
    assert list(cache) == ["blocks.3.attn.hook_pattern", "blocks.5.attn.hook_pattern"]
    assert len(cache) == 2
    assert [weights.shape for weights in cache.values()] == [(1, 4, 5, 5)] * 2
    assert repr(cache) == 'Patterns(of 2 layers: cache["pattern", layer])'


@pytest.mark.parametrize(
    ("A", "shape"),
    [
        pytest.param(matrix(3), (3, 4, 5, 5), id="batch"),
        pytest.param(matrix()[0], (1, 1, 5, 5), id="no heads"),
    ],
)
def test_patterns_have_batch_and_heads(A: regard.AttentionMatrix, shape: tuple[int, ...]) -> None:
    weights = patterns(regard.Recording({"a": A}))["pattern", 0]
    assert torch.equal(weights, A.to_dense().reshape(shape))


@pytest.mark.parametrize(
    "key",
    [
        *[("pattern", 2), ("pattern", -3), ("pattern",), ("q", 0), ("pattern", "a")],
        *["blocks.0.attn.hook_q", "blocks.2.attn.hook_pattern", 0],
    ],
    ids=str,
)
def test_an_unknown_pattern_names_those_that_are_known(key: Any) -> None:
    cache = patterns(recording())
    assert key not in cache
    with pytest.raises(KeyError) as caught:
        cache[key]
    assert caught.value.args == (
        f"key is {key!r}; there are the patterns blocks.0.attn.hook_pattern, "
        'blocks.1.attn.hook_pattern, and the short form cache["pattern", layer]',
    )


def test_a_layer_that_ran_twice_has_no_name_of_its_own() -> None:
    seen = of_places(3)
    seen.add("layer.3", matrix(1), origin=Origin(3))
    message = (
        "layers 'layer.3' and 'layer.3#2' are both blocks.3.attn.hook_pattern; TransformerLens has "
        "one name for each.\n    Ask for them apart, regard.exports.patterns(seen.part(names))."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        patterns(seen)
    assert list(patterns(seen.part(["layer.3#2"]))) == ["blocks.3.attn.hook_pattern"]


# CircuitsVis


def test_circuitsvis_gets_one_layer_without_its_batch() -> None:
    seen = recording()
    form = to_circuitsvis(seen, "b")
    assert sorted(form) == ["attention", "tokens"]
    assert torch.equal(form["attention"], seen["b"].to_dense()[0])
    assert form["tokens"] == list(TEXTS)


# NumPy


def test_numpy_gets_every_layer_by_name_without_gradients() -> None:
    x = torch.randn(1, 2, 5, requires_grad=True)
    seen = regard.Recording({"a": matrix(1), "b": regard.attend(x, x)})
    arrays = to_numpy(seen)
    assert list(arrays) == ["a", "b"]
    for name, array in arrays.items():
        assert torch.equal(torch.from_numpy(array), seen[name].to_dense().detach())


def test_numpy_gets_bfloat16_as_float32_and_counts_its_bytes() -> None:
    A = matrix(1).to(torch.bfloat16)
    seen = regard.Recording({"a": A})
    array = to_numpy(seen, limit=400)["a"]
    assert array.dtype == "float32"
    assert torch.equal(torch.from_numpy(array), A.to_dense().float())
    with pytest.raises(MemoryError, match=r"^to_numpy\(\) would make \(400,\) uint8"):
        to_numpy(seen, limit=399)


# What is too large, or has no such form

Ask = Callable[[regard.Recording, int | None], object]
DENSE: dict[str, tuple[Ask, str]] = {
    "to_bertviz()": (
        lambda seen, limit: to_bertviz(seen, limit=limit),
        "(2, 4, 5, 5) float32 = 800 bytes",
    ),
    "to_circuitsvis()": (
        lambda seen, limit: to_circuitsvis(seen, 0, limit=limit),
        "(1, 4, 5, 5) float32 = 400 bytes",
    ),
    "patterns()": (
        lambda seen, limit: patterns(seen, limit=limit)["pattern", 0],
        "(1, 4, 5, 5) float32 = 400 bytes",
    ),
    "to_numpy()": (lambda seen, limit: to_numpy(seen, limit=limit), "(800,) uint8 = 800 bytes"),
}


@pytest.mark.parametrize("call", DENSE)
def test_dense_weights_have_a_limit(call: str) -> None:
    ask, size = DENSE[call]
    count = int(size.split()[-2])
    message = (
        f"{call} would make {size}; the limit is {count - 1} bytes.\n"
        "    Ask for a part, seen[3][..., rows, cols], or for a summary, seen.pool(512, 512), "
        "or pass limit=None."
    )
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}$"):
        ask(recording(), count - 1)
    ask(recording(), count)
    ask(recording(), None)


def test_the_default_limit_is_that_of_to_dense() -> None:
    x = torch.zeros(1, 1, 40_000, 1)
    with pytest.raises(MemoryError, match=r"= 6\.0 GiB; the limit is 4\.0 GiB"):
        patterns(regard.Recording({"a": regard.attend(x, x)}))["pattern", 0]


@pytest.mark.parametrize("call", ["to_bertviz()", "to_circuitsvis()"])
def test_views_need_the_tokens_of_one_text(call: str) -> None:
    message = (
        f"this recording has no tokens; {call} needs one for each position.\n"
        "    Use seen.with_tokens([regard.Token(text) for text in texts])."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DENSE[call][0](regard.Recording({"a": matrix(1)}), None)
    with pytest.raises(ValueError, match=re.escape(f"{call} looks at one text, a batch of 1.")):
        DENSE[call][0](regard.Recording({"a": matrix(3)}).with_tokens(TEXTS), None)


def test_circuitsvis_shows_no_attention_to_another_text() -> None:
    message = (
        "query_tokens and key_tokens differ; CircuitsVis shows a text that attends to itself.\n"
        "    Use to_bertviz()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        to_circuitsvis(regard.Recording({"a": matrix(1)}).with_tokens(list("abcde"), TEXTS), 0)


@pytest.mark.parametrize("call", DENSE)
def test_a_matrix_that_was_not_kept_has_no_dense_form(call: str) -> None:
    seen = regard.Recording({}, query_tokens=map(regard.Token, TEXTS))
    seen.add("a", None, shape=torch.Size([1, 4, 5, 5]))
    with pytest.raises(regard.RegardError, match="its query and key were not kept"):
        DENSE[call][0](seen, None)
