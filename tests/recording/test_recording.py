"""A recording is a mapping from layers to matrices, by name or by place, with the text if known."""

import copy
import pickle
import re
from pathlib import Path
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


# Questions to all layers


def random_layers() -> dict[str, regard.AttentionMatrix]:
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(1, 2, 7, 5, generator=generator) for _ in range(4))
    return {name: regard.attend(next(tensors), next(tensors)) for name in ("a", "b")}


@pytest.mark.parametrize(
    ("ask", "reduction"),
    [
        pytest.param(lambda seen: seen.entropy(), regard.Entropy(), id="entropy"),
        pytest.param(lambda seen: seen.received(), regard.Sum(-2), id="received"),
        pytest.param(lambda seen: seen.pool(2, 3), regard.Pool(2, 3), id="pool"),
        pytest.param(lambda seen: seen.topk(3), regard.TopK(3), id="topk"),
        pytest.param(lambda seen: seen.reduce(regard.TopK(1)), regard.TopK(1), id="reduce"),
    ],
)
def test_a_question_is_asked_of_every_layer(ask: Any, reduction: regard.Reduction) -> None:
    layers = random_layers()
    answers = ask(regard.Recording(layers))
    assert list(answers) == ["a", "b"]
    for name, matrix in layers.items():
        torch.testing.assert_close(answers[name], matrix.reduce(reduction))


def test_top_k_of_a_layer_with_fewer_keys_has_nan_in_every_entry_of_a_row_of_nan() -> None:
    scores = torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    layers = {"short": regard.AttentionMatrix.from_scores(scores)}
    top = regard.Recording(layers).topk(3)["short"]
    assert top.values.isnan().tolist() == [[False] * 3, [True] * 3]
    assert top.indices.tolist() == [[1, 0, -1], [-1, -1, -1]]


def test_several_questions_have_one_answer_each() -> None:
    entropy, received = regard.Recording(random_layers()).reduce(regard.Entropy(), regard.Sum(-2))[
        "b"
    ]
    torch.testing.assert_close(entropy, random_layers()["b"].entropy())
    torch.testing.assert_close(received, random_layers()["b"].sum(-2))


def test_the_progress_of_a_question_is_told_after_each_layer() -> None:
    told: list[tuple[int, int]] = []
    recording().reduce(regard.Entropy(), progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_no_question_is_an_error() -> None:
    message = (
        "reduce() has no reductions; it needs at least one.\n"
        "    Pass for example regard.Entropy(), regard.TopK(8)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        recording().reduce()


def test_what_is_no_question_is_an_error_before_any_layer_is_asked() -> None:
    message = (
        "reduce() got str; each argument must be an instance of a reduction.\n"
        "    Pass for example regard.Entropy(), regard.TopK(8)."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        regard.Recording({}).reduce("entropy")  # type: ignore[arg-type]


def test_the_rollout_goes_through_all_layers() -> None:
    seen = regard.Recording(random_layers())
    torch.testing.assert_close(
        seen.rollout(0.3).to_dense(), regard.rollout(seen, residual=0.3).to_dense()
    )


def test_attention_to_another_text_cannot_be_rolled_out() -> None:
    message = (
        "layers has shape (2, 2, 3) at 1; q_len and kv_len must be equal.\n"
        "    Only self-attention over whole sequences can be rolled out."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.Recording({"a": matrix(), "cross": matrix(2, 3)}).rollout()


def test_a_batch_of_texts_is_rolled_out_text_by_text() -> None:
    x = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    seen = regard.Recording({name: regard.attend(x, x) for name in "ab"})
    one = regard.Recording({name: seen[name][1] for name in seen})
    torch.testing.assert_close(seen.rollout().to_dense()[1], one.rollout().to_dense())


def test_layers_whose_matrices_were_not_kept_cannot_be_rolled_out() -> None:
    with pytest.raises(regard.RegardError, match=r"^layer 'a' has answers only, Entropy\(\);"):
        kept(regard.Entropy()).rollout()


# A part of it


def test_a_part_has_the_layers_that_were_named_and_the_text() -> None:
    seen = recording(query_tokens=tokens("a", " b", " c"))
    part = seen.part(["c", 0])
    assert list(part) == ["c", "a"]
    assert part[0] is seen["c"]
    assert part.query_tokens == seen.query_tokens
    assert list(seen.part(range(2))) == ["a", "b.attn"]


def test_a_part_of_answers_has_the_answers() -> None:
    seen = kept(regard.Entropy()).part(["b"])
    assert list(seen.kept["b"]) == [regard.Entropy()]


@pytest.mark.parametrize("layer", ["a", 1], ids=["name", "place"])
def test_a_single_layer_is_no_part(layer: Any) -> None:
    message = (
        f"layers is {layer!r}; it takes several names or places.\n"
        f"    Pass [{layer!r}] for that layer alone."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        recording().part(layer)


@pytest.mark.parametrize(("layer", "kind"), [(3, IndexError), ("d", KeyError)])
def test_a_part_that_is_not_there_is_an_error(layer: str | int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"this recording has"):
        recording().part(["a", layer])


def test_the_rollout_of_layers_that_attend_to_another_text_is_an_error() -> None:
    seen = recording(query_tokens=tokens("a", " b", " c"), key_tokens=tokens("x", " y", " z"))
    message = (
        "query_tokens and key_tokens differ; only self-attention can be rolled out.\n"
        "    Take its layers and their tokens, seen.part(names).with_tokens(tokens).rollout()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        seen.rollout()


# Answers that were kept instead of the matrix

SHAPE = torch.Size([1, 2, 7, 7])


def kept(*reductions: regard.Reduction) -> regard.Recording:
    """Of two layers only the answers."""
    seen = regard.Recording({}, model="Tiny")
    for name, matrix in random_layers().items():
        answers = [(reduction, matrix.reduce(reduction)) for reduction in reductions]
        seen.add(name, None, answers=answers, shape=matrix.shape)
    return seen


def test_a_kept_answer_is_given_as_it_is() -> None:
    seen = kept(regard.Entropy())
    assert seen.entropy()["a"] is seen.kept["a"][regard.Entropy()]


def test_a_layer_whose_answers_were_kept_is_one_of_the_layers() -> None:
    seen = kept(regard.Entropy())
    assert [layer.name for layer in seen.layers] == ["a", "b"]
    assert seen.shapes == {"a": SHAPE, "b": SHAPE}


def test_a_recording_is_a_mapping_to_the_matrices_that_were_kept() -> None:
    seen = kept(regard.Entropy())
    added = seen.add("c", random_layers()["a"])
    assert list(seen) == list(dict(seen)) == [added]
    assert len(seen) == len(seen.items()) == len(seen.values()) == 1
    assert seen.get("a") is None
    assert seen.get("none of them") is None
    assert seen.get("c") is seen["c"]
    assert [name in seen for name in ("a", "c", "d")] == [False, True, False]
    with pytest.raises(regard.RegardError, match=r"^layer 'a' has answers only, Entropy\(\); its"):
        seen["a"]


def test_answers_are_found_by_what_was_asked_even_without_a_hash() -> None:
    seen = kept(regard.Segments([(0, 3), (3, 7)]))
    asked = regard.Segments([(0, 3), (3, 7)])
    assert seen.reduce(asked)["b"] is seen.kept["b"][asked]


def test_fewer_of_the_largest_are_the_beginning_of_more() -> None:
    fewer, expected = kept(regard.TopK(5)).topk(2)["a"], random_layers()["a"].topk(2)
    torch.testing.assert_close(fewer, expected)


def test_beside_kept_answers_the_matrix_answers_the_rest() -> None:
    matrix = random_layers()["a"]
    seen = regard.Recording({})
    seen.add("a", matrix, answers=[(regard.Entropy(), "kept")])
    entropy, received, top = seen.reduce(regard.Entropy(), regard.Sum(-2), regard.TopK(1))["a"]
    assert entropy == "kept"
    torch.testing.assert_close((received, top), matrix.reduce(regard.Sum(-2), regard.TopK(1)))


def test_without_kept_answers_nothing_is_kept() -> None:
    assert recording().kept == {}


def test_kept_answers_stay_when_the_text_comes() -> None:
    seen = kept(regard.Entropy()).with_tokens(tokens(*"abcdefg"))
    assert list(seen.kept["a"]) == [regard.Entropy()]


def test_a_layer_with_answers_only_says_which() -> None:
    assert repr(kept(regard.Entropy(), regard.TopK(2))).splitlines()[1] == (
        "  0  a  answers only, of shape (1, 2, 7, 7): Entropy(), TopK(k=2)"
    )


def test_the_answers_of_a_layer_show_what_was_asked() -> None:
    assert repr(kept(regard.Entropy(), regard.TopK(2)).kept["a"]) == "Answers(Entropy(), TopK(k=2))"


@pytest.mark.parametrize("layer", ["a", 0], ids=["by name", "by place"])
def test_a_matrix_that_was_not_kept_is_an_error(layer: str | int) -> None:
    message = (
        "layer 'a' has answers only, Entropy(); its query and key were not kept.\n"
        '    Observe the model again with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        kept(regard.Entropy())[layer]


@pytest.mark.parametrize(
    "asked", [regard.Sum(-1), regard.TopK(3)], ids=["another question", "more of the largest"]
)
def test_an_answer_that_was_not_kept_is_an_error(asked: regard.Reduction) -> None:
    message = (
        f"layer 'a' has no answer to {asked!r}, and its query and key were not kept; "
        "it has Entropy(), TopK(k=2).\n"
        '    Observe the model again with this reduction in keep=[...], or with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        kept(regard.Entropy(), regard.TopK(2)).reduce(asked)


def test_a_layer_needs_a_shape_where_its_matrix_is_not_kept() -> None:
    message = (
        "matrix is None and shape is None; one of them must be there.\n"
        "    Pass shape=matrix.shape where only answers are kept."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.Recording({}).add("a", None)


def test_a_layer_that_is_added_must_fit_the_text() -> None:
    seen = recording(query_tokens=tokens("a", " b", " c"))
    message = "query_tokens has 3 tokens; layer 'd' has q_len = 4." + REMEDY
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        seen.add("d", matrix(4, 4))
    assert "d" not in seen


def test_the_name_that_a_layer_gets_is_told() -> None:
    seen = recording()
    assert [seen.add("a", matrix()), seen.add("d", matrix())] == ["a#2", "d"]


def test_a_layer_is_put_in_the_place_of_the_one_of_its_name() -> None:
    seen, other = recording(), regard.Recording({"a": matrix(4, 4)})
    seen.put(other.layers[0])
    assert list(seen) == ["a", "b.attn", "c"]
    assert seen["a"] is other["a"]


# As a file


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    seen = regard.Recording(random_layers(), model="Tiny").with_tokens(tokens(*"abcdefg"))
    seen.add("kept", None, answers=[(regard.Entropy(), torch.ones(1, 2, 7))], shape=SHAPE)
    seen.save(tmp_path / "run.safetensors")
    loaded = regard.load(tmp_path / "run.safetensors")
    assert repr(loaded) == repr(seen)
    assert (loaded.model, loaded.shapes) == (seen.model, seen.shapes)
    assert (loaded.query_tokens, loaded.key_tokens) == (seen.query_tokens, seen.key_tokens)
    for name in ("a", "b"):
        assert torch.equal(loaded[name].to_dense(), seen[name].to_dense())
    assert torch.equal(loaded.entropy()["kept"], torch.ones(1, 2, 7))


def test_a_recording_saves_over_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    recording().save(path)
    regard.Recording({"z": matrix()}).save(path)
    assert list(regard.load(path)) == ["z"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    message = f"there is no file {path}; a recording is made with seen.save()."
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
        regard.load(path)


# Never a pickle


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_recording_is_saved_and_not_pickled(copied: Any) -> None:
    message = (
        "pickle has a Recording; a recording is saved as a file that runs no code.\n"
        '    Use seen.save("run.safetensors") and regard.load("run.safetensors").'
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        copied(recording())


def test_strings_are_tokens(tmp_path: Path) -> None:
    seen = self_attention().with_tokens(["a", "b", "c"])
    assert seen.query_tokens == seen.key_tokens == tuple(map(regard.Token, "abc"))
    seen.query_tokens = seen.key_tokens = ["a", "b", "c"]  # type: ignore[assignment]
    seen.save(tmp_path / "run.safetensors")
    assert regard.load(tmp_path / "run.safetensors").key_tokens == tuple(map(regard.Token, "abc"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        pytest.param("abc", "query_tokens is a text; it must be tokens.", id="a text"),
        pytest.param([1, 2, 3], "query_tokens has an int at place 0;", id="ids"),
    ],
)
def test_what_is_no_token_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        self_attention().with_tokens(tokens)


def self_attention() -> regard.Recording:
    x = torch.zeros(1, 3, 2)
    return regard.Recording({"a": regard.attend(x, x)})
