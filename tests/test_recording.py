"""A recording is a mapping from layers to matrices, by name or by place, with the text if known."""

import re
from typing import Any

import pytest
import torch

import regard


def matrix(q_len: int = 3, kv_len: int = 3) -> regard.AttentionMatrix:
    return regard.attend(torch.zeros(2, q_len, 5), torch.zeros(2, kv_len, 5))


def recording(**tokens: Any) -> regard.Recording:
    return regard.Recording({"a": matrix(), "b.attn": matrix(), "c": matrix()}, **tokens)


def tokens(*texts: str) -> list[regard.Token]:
    return [regard.Token(text) for text in texts]


# A mapping


def test_a_layer_is_found_by_its_name_and_by_its_place() -> None:
    layers = {"a": matrix(), "b": matrix()}
    seen = regard.Recording(layers)
    assert seen["b"] is seen[1] is seen[-1] is layers["b"]


def test_its_names_come_in_the_order_in_which_the_layers_ran() -> None:
    seen = regard.Recording({"z": matrix(), "a": matrix()})
    assert list(seen) == list(seen.keys()) == ["z", "a"]
    assert len(seen) == len(seen.values()) == 2


def test_a_name_is_in_it_or_not() -> None:
    assert "b.attn" in recording()
    assert "b" not in recording()


def test_a_name_that_is_taken_gets_a_number() -> None:
    seen = regard.Recording({})
    matrices = [matrix() for _ in range(4)]
    for name, layer in zip(("a", "a", "b", "a"), matrices, strict=True):
        seen.add(name, layer)
    assert list(seen) == ["a", "a#2", "b", "a#3"]
    assert list(seen.values()) == matrices


def test_what_is_added_later_does_not_reach_the_mapping_it_came_from() -> None:
    layers = {"a": matrix()}
    regard.Recording(layers).add("b", matrix())
    assert list(layers) == ["a"]


def test_an_empty_recording_is_false() -> None:
    assert not regard.Recording({})
    assert recording()


def test_it_shows_one_line_for_each_layer() -> None:
    seen = regard.Recording({"a": matrix(), "b.attn": matrix(2, 7)}, model="Tiny")
    assert repr(seen).splitlines() == [
        "Recording of Tiny, 2 layers",
        f"  0  a  {seen[0]!r}",
        f"  1  b.attn  {seen[1]!r}",
    ]


def test_without_a_name_it_is_of_a_model() -> None:
    assert repr(regard.Recording({})) == "Recording of a model, 0 layers"


# What is not there


@pytest.mark.parametrize("place", [3, -4])
def test_a_place_outside_names_the_places_there_are(place: int) -> None:
    message = f"layer is {place}; this recording has 3 layers, 0 to 2."
    with pytest.raises(IndexError, match=f"^{re.escape(message)}$"):
        recording()[place]


def test_a_place_in_an_empty_recording_says_that_it_is_empty() -> None:
    with pytest.raises(IndexError, match=r"^layer is 0; this recording has no layers yet\.$"):
        regard.Recording({})[0]


@pytest.mark.parametrize(
    ("seen", "known"),
    [
        pytest.param(recording(), "a, b.attn, c", id="three"),
        pytest.param(
            regard.Recording({name: matrix() for name in "abcd"}), "a, b, c, ...", id="more"
        ),
        pytest.param(regard.Recording({}), "no layers yet", id="none"),
    ],
)
def test_an_unknown_name_tells_some_that_are_known(seen: regard.Recording, known: str) -> None:
    with pytest.raises(KeyError) as caught:
        seen["layer.9"]
    assert caught.value.args == (f"layer is 'layer.9'; this recording has {known}",)


# The text


def test_a_token_is_text_and_whether_the_tokenizer_added_it() -> None:
    assert regard.Token("a") == ("a", False)
    assert regard.Token("[CLS]", special=True).special


def test_the_keys_have_the_tokens_of_the_queries_unless_others_are_given() -> None:
    seen = recording(query_tokens=tokens("a", " b", " c"))
    assert seen.query_tokens == seen.key_tokens == tuple(tokens("a", " b", " c"))


def test_queries_and_keys_may_have_tokens_of_their_own() -> None:
    cross = regard.Recording(
        {"a": matrix(2, 3)}, query_tokens=tokens("x", "y"), key_tokens=tokens("a", "b", "c")
    )
    assert cross.query_tokens == tuple(tokens("x", "y"))
    assert cross.key_tokens == tuple(tokens("a", "b", "c"))


def test_without_tokens_there_are_none() -> None:
    assert recording().query_tokens is None
    assert recording().key_tokens is None


def test_tokens_are_read_once_so_that_a_generator_will_do() -> None:
    seen = recording(query_tokens=(token for token in tokens("a", "b", "c")))
    assert seen.query_tokens == seen.key_tokens == tuple(tokens("a", "b", "c"))


def test_with_tokens_is_another_recording_of_the_same_layers() -> None:
    bare = regard.Recording({"a": matrix(2, 3)}, model="Tiny")
    seen = bare.with_tokens(tokens("x", "y"), tokens("a", "b", "c"))
    assert bare.query_tokens is None
    assert seen.model == "Tiny"
    assert seen[0] is bare[0]
    assert seen.query_tokens == tuple(tokens("x", "y"))
    assert seen.key_tokens == tuple(tokens("a", "b", "c"))


REMEDY = "\n    Give one token for each position, special tokens included."


@pytest.mark.parametrize(
    ("query_tokens", "key_tokens", "message"),
    [
        pytest.param(
            tokens("x"),
            None,
            "query_tokens has 1 tokens; layer 'cross' has q_len = 2." + REMEDY,
            id="queries",
        ),
        pytest.param(
            tokens("x", "y"),
            tokens("a"),
            "key_tokens has 1 tokens; layer 'cross' has kv_len = 3." + REMEDY,
            id="keys",
        ),
        pytest.param(
            tokens("x", "y"),
            None,
            "key_tokens has 2 tokens; layer 'cross' has kv_len = 3." + REMEDY,
            id="the query tokens as keys",
        ),
    ],
)
def test_tokens_must_be_one_for_each_position(
    query_tokens: list[regard.Token], key_tokens: list[regard.Token] | None, message: str
) -> None:
    seen = regard.Recording({"cross": matrix(2, 3)})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        seen.with_tokens(query_tokens, key_tokens)
