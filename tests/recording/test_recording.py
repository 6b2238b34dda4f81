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


def test_many_equal_layers_are_printed_in_one_line() -> None:
    x = torch.zeros(2, 3, 4)
    layers = {f"layers.{place}": regard.attend(x, x) for place in range(30)}
    lines = repr(regard.Recording(layers, model="Tiny")).splitlines()
    assert lines[0] == "Recording of Tiny, 30 layers"
    assert lines[1].startswith("  0 to 29  layers.0 to layers.29  AttentionMatrix(")
    assert len(lines) == 2


def test_trials_are_saved_with_a_recording_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    x = torch.zeros(2, 3, 4)
    seen = regard.Recording({"layer": regard.attend(x, x)})
    seen.trials = [{"layer": {"induction": [0.9, 0.25]}}]
    seen.save(tmp_path / "run.safetensors")
    again = regard.load(tmp_path / "run.safetensors")
    assert again.trials == seen.trials
    assert regard.heads(again)["kind"][0] == "induction"
    assert again.part(["layer"]).trials == seen.trials
    seen.trials = [{"layer": {"induction": [7.0]}}]
    seen.save(tmp_path / "bad.safetensors")
    with pytest.raises(regard.RegardError, match="damaged"):
        regard.load(tmp_path / "bad.safetensors")


def test_a_layer_is_found_by_its_name_and_by_its_place() -> None:
    layers = {"a": matrix(), "b": matrix()}
    seen = regard.Recording(layers)
    assert seen["b"] is seen[1] is seen[-1] is layers["b"]


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


def test_names_come_in_the_order_in_which_the_layers_ran() -> None:
    seen = regard.Recording({"z": matrix(), "a": matrix()})
    assert list(seen) == list(seen.keys()) == ["z", "a"]
    assert len(seen) == len(seen.values()) == 2
    assert "z" in seen
    assert "b" not in seen
    assert not regard.Recording({})


def test_it_shows_one_line_for_each_layer() -> None:
    seen = regard.Recording({"a": matrix(), "b.attn": matrix(2, 7)}, model="Tiny")
    seen.add("c", None, answers=[(regard.Entropy(), 0), (regard.TopK(2), 0)], shape=SHAPE)
    assert repr(seen).splitlines() == [
        "Recording of Tiny, 3 layers",
        f"  0  a  {seen[0]!r}",
        f"  1  b.attn  {seen[1]!r}",
        "  2  c  answers only, of shape (1, 2, 7, 7): Entropy(), TopK(k=2)",
    ]
    assert repr(seen.kept["c"]) == "Answers(Entropy(), TopK(k=2))"
    assert repr(regard.Recording({})) == "Recording of a model, 0 layers"


# The text


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "in a file"])
def test_strings_and_generators_are_tokens_of_queries_and_keys(saved: bool, tmp_path: Path) -> None:
    both = regard.Recording({"a": matrix()}, query_tokens=(text for text in "abc"))
    cross = regard.Recording({"a": matrix(2, 3)}).with_tokens(["x", "y"], ["a", "b", "c"])
    for seen, query_tokens in ((both, "abc"), (cross, "xy")):
        if saved:
            seen.save(tmp_path / "run.safetensors")
            seen = regard.load(tmp_path / "run.safetensors")
        assert seen.query_tokens == tuple(tokens(*query_tokens))
        assert seen.key_tokens == tuple(tokens(*"abc"))
    assert recording().query_tokens is recording().key_tokens is None


def test_the_keys_have_the_tokens_of_the_queries_unless_others_are_given() -> None:
    seen = recording(query_tokens=tokens("a", " b", " c"))
    assert seen.query_tokens == seen.key_tokens == tuple(tokens("a", " b", " c"))


def test_with_tokens_is_another_recording_of_the_same_layers() -> None:
    bare = regard.Recording({"a": matrix(2, 3)}, model="Tiny")
    seen = bare.with_tokens(tokens("x", "y"), tokens("a", "b", "c"))
    assert bare.query_tokens is None
    assert seen.model == "Tiny"
    assert seen[0] is bare[0]
    assert seen.query_tokens == tuple(tokens("x", "y"))
    assert seen.key_tokens == tuple(tokens("a", "b", "c"))


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


def test_the_rollout_goes_through_all_layers() -> None:
    seen = regard.Recording(random_layers())
    torch.testing.assert_close(
        seen.rollout(0.3).to_dense(), regard.rollout(seen, residual=0.3).to_dense()
    )


def test_a_batch_of_texts_is_rolled_out_text_by_text() -> None:
    x = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    seen = regard.Recording({name: regard.attend(x, x) for name in "ab"})
    one = regard.Recording({name: seen[name][1] for name in seen})
    torch.testing.assert_close(seen.rollout().to_dense()[1], one.rollout().to_dense())


# A part of it


def test_a_part_has_the_layers_that_were_named_and_the_text() -> None:
    seen = recording(query_tokens=tokens("a", " b", " c"))
    part = seen.part(["c", 0])
    assert list(part) == ["c", "a"]
    assert part[0] is seen["c"]
    assert part.query_tokens == seen.query_tokens
    assert list(seen.part(range(2))) == ["a", "b.attn"]


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


def test_a_name_that_is_taken_for_a_matrix_says_how_to_get_it() -> None:
    names: Any = regard.Recording({"attention": matrix()})
    with pytest.raises(AttributeError) as raised:
        [layer.entropy() for layer in names]
    assert str(raised.value) == (
        "'attention' is the name of a layer and has no 'entropy'; a recording is a mapping.\n"
        "    For names and matrices write: for name, A in seen.items()"
    )
    assert list(names) == ["attention"]


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


def test_a_layer_that_is_added_must_fit_the_text() -> None:
    seen = recording(query_tokens=tokens("a", " b", " c"))
    message = "query_tokens has 3 tokens; layer 'd' has q_len = 4." + REMEDY
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        seen.add("d", matrix(4, 4))
    assert "d" not in seen


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


# Wrong use, in the words of the error


REMEDY = "\n    Give one token for each position, special tokens included."
NO_LAYER = "; this recording has 3 layers, 0 to 2."
ASK = "\n    Pass for example regard.Entropy(), regard.TopK(8)."
AGAIN = '\n    Observe the model again with this reduction in keep=[...], or with keep="qk".'
PICKLE = (
    "pickle has a Recording; a recording is saved as a file that runs no code.\n"
    '    Use seen.save("run.safetensors") and regard.load("run.safetensors").'
)


def cross() -> regard.Recording:
    return regard.Recording({"cross": matrix(2, 3)})


def empty() -> regard.Recording:
    return regard.Recording({})


def answers() -> regard.Recording:
    return kept(regard.Entropy(), regard.TopK(2))


def two_texts() -> regard.Recording:
    return recording(query_tokens=tokens("a", " b", " c"), key_tokens=tokens("x", " y", " z"))


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    (recording, lambda seen: seen[3], IndexError, f"layer is 3{NO_LAYER}"),
    (recording, lambda seen: seen[-4], IndexError, f"layer is -4{NO_LAYER}"),
    (recording, lambda seen: seen.part(["a", 3]), IndexError, f"layer is 3{NO_LAYER}"),
    (empty, lambda seen: seen[0], IndexError, "layer is 0; this recording has no layers yet."),
    (recording, lambda seen: seen["d"], KeyError, "layer is 'd'; this recording has a, b.attn, c"),
    (empty, lambda seen: seen["d"], KeyError, "layer is 'd'; this recording has no layers yet"),
    (recording, lambda seen: seen.part(["d"]), KeyError, "layer is 'd'; this recording has a, b"),
    (
        *(recording, lambda seen: seen.part("a"), TypeError),
        "layers is 'a'; it takes several names or indices.\n    Pass ['a'] for that layer alone.",
    ),
    (
        *(recording, lambda seen: seen.part(1), TypeError),
        "layers is 1; it takes several names or indices.\n    Pass [1] for that layer alone.",
    ),
    (
        *(cross, lambda seen: seen.with_tokens("x"), TypeError),
        "query_tokens is a text; it must be tokens.",
    ),
    (
        *(cross, lambda seen: seen.with_tokens([1, 2]), TypeError),
        "query_tokens has an int at place 0;",
    ),
    (
        *(cross, lambda seen: seen.with_tokens(["x"]), ValueError),
        "query_tokens has 1 tokens; layer 'cross' has q_len = 2." + REMEDY,
    ),
    (
        *(cross, lambda seen: seen.with_tokens(["x", "y"], ["a"]), ValueError),
        "key_tokens has 1 tokens; layer 'cross' has kv_len = 3." + REMEDY,
    ),
    (
        *(cross, lambda seen: seen.with_tokens(["x", "y"]), ValueError),
        "key_tokens has 2 tokens; layer 'cross' has kv_len = 3." + REMEDY,
    ),
    (
        *(recording, lambda seen: seen.reduce(), ValueError),
        "reduce() has no reductions; it needs at least one." + ASK,
    ),
    (
        *(empty, lambda seen: seen.reduce("entropy"), TypeError),
        "reduce() got str; each argument must be an instance of a reduction." + ASK,
    ),
    (
        *(cross, lambda seen: seen.rollout(), ValueError),
        "layers has shape (2, 2, 3) at 0; q_len and kv_len must be equal.\n"
        "    Only self-attention over whole sequences can be rolled out.",
    ),
    (
        *(two_texts, lambda seen: seen.rollout(), ValueError),
        "query_tokens and key_tokens differ; only self-attention can be rolled out.\n"
        "    Take its layers and their tokens, seen.part(names).with_tokens(tokens).rollout().",
    ),
    *(
        (
            *(answers, use, regard.RegardError),
            "layer 'a' has answers only, Entropy(), TopK(k=2); its query and key were not kept.\n"
            '    Observe the model again with keep="qk".',
        )
        for use in (lambda seen: seen["a"], lambda seen: seen[0], lambda seen: seen.rollout())
    ),
    *(
        (
            *(answers, lambda seen, asked=asked: seen.reduce(asked), regard.RegardError),
            f"layer 'a' has no answer to {asked!r}, and its query and key were not kept; "
            "it has Entropy(), TopK(k=2)." + AGAIN,
        )
        for asked in (regard.Sum(-1), regard.TopK(3))
    ),
    (
        *(empty, lambda seen: seen.add("a", None), ValueError),
        "matrix is None and shape is None; one of them must be there.\n"
        "    Pass shape=matrix.shape where only answers are kept.",
    ),
    *((recording, use, TypeError, PICKLE) for use in (pickle.dumps, copy.copy, copy.deepcopy)),
]


@pytest.mark.parametrize(("of", "use", "kind", "message"), WRONG)
def test_wrong_use_is_an_error(of: Any, use: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        use(of())
    assert str(caught.value.args[0]).startswith(message)
