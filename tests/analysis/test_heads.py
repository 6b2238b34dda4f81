"""Kinds of heads, on matrices whose kind is known, and against the definition written out."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.analysis.head_classes import Trial, classify, head_table
from regard.analysis.head_kinds import KINDS, Head, meaning, stand_out
from regard.analysis.head_survey import Survey
from regard.recording.layers import Queries

N = 7
# [CLS] a b c d e [SEP]
TOKENS = [
    regard.Token("[CLS]", special=True),
    *(regard.Token(f" {letter}") for letter in "abcde"),
    regard.Token("[SEP]", special=True),
]


def looking(at: int | None = None, *, by: int | None = None, share: float = 0.9) -> Tensor:
    """Each query gives a share to the key ``at``, or to the key ``by`` further; the rest evenly."""
    keys = torch.arange(N) + by if by is not None else torch.full((N,), at)
    peak = torch.nn.functional.one_hot(keys.clamp(0, N - 1), N).double()
    return share * peak + (1 - share) / N


def recording(*heads: Tensor, tokens: list[regard.Token] | None = TOKENS) -> regard.Recording:
    matrix = regard.AttentionMatrix.from_weights(torch.stack(heads)[None])
    return regard.Recording({"layer": matrix}, query_tokens=tokens)


def heads_of(seen: regard.Recording, *trials: Trial) -> tuple[Head, ...]:
    return classify(seen.layers, seen.query_tokens, seen.key_tokens, trials=trials)


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        pytest.param(looking(by=-1), "previous token", id="previous"),
        pytest.param(looking(by=1), "next token", id="next"),
        pytest.param(looking(by=0), "self", id="self"),
        pytest.param(looking(at=0), "first-token sink", id="first"),
        pytest.param(looking(at=N - 1), "separator sink", id="separator"),
        pytest.param(looking(at=3, share=0.0), "uniform", id="uniform"),
        pytest.param(looking(at=3), "mixed", id="one word"),
    ],
)
def test_a_head_is_of_the_kind_it_was_made(weights: Tensor, kind: str) -> None:
    [head] = heads_of(recording(weights))
    assert (head.kind, head.layer, head.head) == (kind, 0, 0)


@pytest.mark.parametrize(("share", "kind"), [(0.4, "mixed"), (0.6, "previous token")])
def test_half_of_the_attention_makes_a_kind(share: float, kind: str) -> None:
    [head] = heads_of(recording(looking(by=-1, share=share)))
    assert (head.kind, head.score) == (kind, pytest.approx(share + (1 - share) / N))


@pytest.mark.parametrize(
    ("tokens", "text", "separators"),
    [
        pytest.param(TOKENS, range(1, N - 1), [N - 1], id="special tokens"),
        pytest.param(None, range(1, N), [], id="no tokens"),
        pytest.param([*TOKENS[:3], TOKENS[0], *TOKENS[4:]], [1, 2, 4, 5], [3, N - 1], id="within"),
    ],
)
def test_scores_equal_their_definition(
    tokens: list[regard.Token] | None, text: Sequence[int], separators: list[int]
) -> None:
    torch.manual_seed(0)
    weights = torch.rand(3, N, N, dtype=torch.float64).softmax(-1)
    heads = heads_of(recording(*weights, tokens=tokens))
    for head, matrix in zip(heads, weights.tolist(), strict=True):
        expected = {
            "previous token": mean(matrix[q][q - 1] for q in text if q - 1 in text),
            "next token": mean(matrix[q][q + 1] for q in text if q + 1 in text),
            "self": mean(matrix[q][q] for q in text),
            "first-token sink": mean(matrix[q][0] for q in text),
            "separator sink": mean(sum(matrix[q][k] for k in separators) for q in text),
            "uniform": mean(-sum(w * math.log(w) for w in matrix[q]) / math.log(N) for q in text),
        }
        assert head.scores == pytest.approx(expected, rel=1e-6)


def mean(values: object) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_texts_have_kinds(length: int) -> None:
    x = torch.zeros(length, 1)
    [head] = heads_of(regard.Recording({"layer": regard.attend(x, x, mask=regard.Causal())}))
    assert all(0 <= score <= 1 for score in head.scores.values())


# Padding


LEFT, WORDS, RIGHT = 5, 26, 3
LENGTH = LEFT + WORDS + RIGHT
REAL = torch.zeros(LENGTH, dtype=torch.bool)
REAL[LEFT : LEFT + WORDS] = True
CAUSAL = torch.ones(LENGTH, LENGTH).tril().bool()
PADDED = {
    "keys": {"mask": regard.Causal() & regard.Keep(REAL)},
    "a dense mask": {"mask": CAUSAL & REAL},
    "the lowest number": {"bias": torch.zeros(LENGTH, LENGTH).masked_fill(
        ~(CAUSAL & REAL), torch.finfo(torch.float32).min)},
    "a low number": {"bias": torch.full((LENGTH,), -1e4).masked_fill(REAL, 0),
                     "mask": regard.Causal()},
    "rows that look everywhere": {
        "mask": regard.Causal() & regard.Keep(REAL) | regard.Keep(~REAL[:, None]),
        "bias": torch.zeros(LENGTH, 1).masked_fill(~REAL[:, None], torch.finfo(torch.float32).min),
    },
    "a window": {"mask": regard.SlidingWindow(7, 0) & regard.Keep(REAL)},
}  # fmt: skip


def padded(**options: Any) -> tuple[regard.AttentionMatrix, regard.AttentionMatrix]:
    """Two heads on a text between padding, and the same on the text alone."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 2, LENGTH, 4)
    is_window = "Window" in repr(options.get("mask"))
    alone = regard.SlidingWindow(7, 0) if is_window else regard.Causal()
    text = slice(LEFT, LEFT + WORDS)
    one = regard.attend(query[..., text, :], key[..., text, :], mask=alone)
    return regard.attend(query, key, **options), one


def assert_same_scores(seen: regard.Recording, expected: regard.Recording) -> None:
    for head, other in zip(heads_of(seen), heads_of(expected), strict=True):
        assert head.scores == pytest.approx(other.scores, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED)
def test_padding_changes_no_score(options: dict[str, Any]) -> None:
    assert_same_scores(*(regard.Recording({"a": matrix}) for matrix in padded(**options)))


def test_special_tokens_before_the_text_are_padding_and_not_separators() -> None:
    matrix, alone = padded(**PADDED["keys"])
    words = [regard.Token("<s>", special=True), *map(regard.Token, "ab" * 12)]
    words += [regard.Token("</s>", special=True)]
    pad = regard.Token("<pad>", special=True)
    tokens = [pad] * LEFT + words + [pad] * RIGHT
    assert_same_scores(
        regard.Recording({"a": matrix}, query_tokens=tokens),
        regard.Recording({"a": alone}, query_tokens=words),
    )


def test_texts_of_a_batch_are_padded_each_in_its_own_way() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 2, 31, 4)
    starts = [0, 4, 25]  # the last is too short for a local score
    real = torch.arange(31) >= torch.tensor(starts)[:, None, None, None]
    batch = regard.Recording({"a": regard.attend(query, key, mask=regard.Causal() & real)})
    each = [
        heads_of(regard.Recording({"a": regard.attend(*pair, mask=regard.Causal())}))
        for pair in ((query[i, :, at:], key[i, :, at:]) for i, at in enumerate(starts))
    ]
    for index, head in enumerate(heads_of(batch)):
        for name, score in head.scores.items():
            of_texts = [one[index].scores[name] for one in each if name in one[index].scores]
            assert score == pytest.approx(mean(of_texts), abs=1e-5)
    assert heads_of(batch.entry(1))[0].scores == pytest.approx(each[1][0].scores, abs=1e-5)


@pytest.mark.parametrize(
    "mask", [regard.SlidingWindow(3, 0), torch.ones(N, N).tril().triu(-3).bool()], ids=type
)
def test_what_a_window_hides_of_some_queries_is_no_padding(mask: Any) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, N, 4)
    last = regard.masks.RowSlice(regard.masks.as_mask(mask), N - 2, N)
    seen = regard.Recording({})
    part = regard.attend(query[:, -2:], key, mask=last)
    seen.add("a", part, queries=Queries(start=N - 2, ran=N))
    assert [head.scores["first-token sink"] for head in heads_of(seen)] == [0]


def test_padding_is_known_where_only_some_queries_were_kept() -> None:
    matrix, alone = padded(**PADDED["keys"])
    query, key = matrix.source.query[..., -6:, :], matrix.source.key
    seen = regard.Recording({})
    mask = regard.masks.RowSlice(regard.Causal(), LENGTH - 6, LENGTH) & regard.Keep(REAL)
    rows = Queries(start=LENGTH - 6, ran=LENGTH)
    seen.add("a", regard.attend(query, key, mask=mask), queries=rows)
    first = alone[0, :, WORDS - 3 :, 0].mean(-1)
    scores = [head.scores["first-token sink"] for head in heads_of(seen)]
    assert scores == pytest.approx(first.tolist(), abs=1e-5)


@pytest.mark.parametrize("dense", ["a dense mask", "the lowest number"])
@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [(0, LEFT + 6, range(LEFT, LENGTH)), (LENGTH - 9, LENGTH, range(LEFT + WORDS))],
    ids=["first", "last"],
)
def test_padding_where_the_kept_queries_stand_is_known_from_what_they_see(
    dense: str, start: int, stop: int, text: range
) -> None:
    matrix, _ = padded(**PADDED[dense])
    query, key = matrix.source.query[..., start:stop, :], matrix.source.key
    given = {name: each[start:stop] for name, each in PADDED[dense].items()}
    seen, rows = regard.Recording({}), Queries(start=start, ran=LENGTH)
    seen.add("a", regard.attend(query, key, **given), queries=rows)
    assert seen.layers[0].texts == (text,)


# Several texts, another text, answers


def test_of_several_texts_the_scores_are_means() -> None:
    weights = torch.stack([looking(by=-1), looking(at=0)])[:, None]  # (batch, num_heads, N, N)
    matrix = regard.AttentionMatrix.from_weights(weights)
    [both] = heads_of(regard.Recording({"layer": matrix}, query_tokens=TOKENS))
    [one], [other] = heads_of(recording(weights[0, 0])), heads_of(recording(weights[1, 0]))
    mean_of_two = {name: (one.scores[name] + other.scores[name]) / 2 for name in one.scores}
    assert both.scores == pytest.approx(mean_of_two)


def test_heads_that_share_keys_have_scores_of_their_own() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, N, 8), torch.randn(1, 2, N, 8)
    shared, repeated = key, key.repeat_interleave(2, 1)
    assert_same_scores(
        *(regard.Recording({"a": regard.attend(query, k)}) for k in (shared, repeated))
    )


CROSS = {
    "two lengths": (torch.rand(1, N, 5).softmax(-1), None),
    "tokens of another text": (torch.rand(1, N, N).softmax(-1), list(reversed(TOKENS))),
}


@pytest.mark.parametrize(("weights", "keys"), CROSS.values(), ids=CROSS)
def test_where_a_layer_attends_to_another_text_positions_have_no_scores(
    weights: Tensor, keys: list[regard.Token] | None
) -> None:
    matrix = regard.AttentionMatrix.from_weights(weights)
    tokens = None if keys is None else TOKENS
    [head] = heads_of(regard.Recording({"layer": matrix}, query_tokens=tokens, key_tokens=keys))
    assert set(head.scores) == {"first-token sink", "separator sink", "uniform"}


def test_the_special_tokens_of_another_text_are_separators() -> None:
    keys = [regard.Token("a"), TOKENS[-1], regard.Token("b")]
    A = regard.AttentionMatrix.from_weights(torch.tensor([0.1, 0.7, 0.2]).expand(1, N, 3))
    [head] = heads_of(regard.Recording({"layer": A}, query_tokens=TOKENS, key_tokens=keys))
    assert (head.kind, head.score) == ("separator sink", pytest.approx(0.7))


def test_kept_answers_tell_the_kinds_without_query_and_key() -> None:
    torch.manual_seed(0)
    matrix = regard.attend(torch.randn(2, N, 4), torch.randn(2, N, 4))
    asked = Survey(tuple(token.special for token in TOKENS)).reductions
    seen = regard.Recording({}, query_tokens=TOKENS)
    answers = zip(asked, matrix.reduce(*asked), strict=True)
    seen.add("layer", None, answers=answers, shape=matrix.shape)
    whole = regard.Recording({"layer": matrix}, query_tokens=TOKENS)
    assert heads_of(seen) == heads_of(whole)


# Local


def near(length: int, share: float, width: int = 4) -> Tensor:
    """Each query gives a share to the tokens up to so far from it, the rest evenly to all."""
    index = torch.arange(length)
    band = ((index[:, None] - index).abs() <= width).double()
    return share * band / band.sum(-1, keepdim=True) + (1 - share) / length


def test_a_head_that_looks_around_itself_is_local() -> None:
    [head] = heads_of(recording(near(50, 0.8), tokens=None))
    assert head.kind == "local"
    of_far = [0.8 + 0.2 * min(9, 54 - q) / 50 for q in range(20, 50)]
    assert head.score == pytest.approx(mean(of_far), rel=1e-6)


def test_a_nearer_kind_goes_before_local() -> None:
    weights = 0.6 * torch.eye(50).roll(-1, -1).double() + 0.4 * near(50, 1.0)
    [head] = heads_of(recording(weights, tokens=None))
    assert head.scores["local"] > head.scores["previous token"]
    assert head.kind == "previous token"


def test_a_text_too_short_to_look_far_has_no_local_score() -> None:
    scores = [heads_of(recording(near(n, 0.8), tokens=None))[0].scores for n in (20, 21)]
    assert ["local" in named for named in scores] == [False, True]


# Trials


def test_a_kind_that_a_trial_shows_goes_before_those_of_the_text() -> None:
    trial = Trial({"layer": {"induction": (0.45, 0.2), "duplicate token": (0.41, 0.1)}})
    sink = looking(at=0)
    first, second = heads_of(recording(sink, sink), trial)
    assert (first.kind, first.score) == ("induction", 0.45)
    assert (second.kind, second.scores["induction"]) == ("first-token sink", 0.2)


UNFIT_TRIALS = {
    "another layer": (
        Trial({"other": {"induction": (0.5,)}}),
        "trial has no layer 'layer'; it has other.\n"
        "    Run the trial on the model of the recording, and observe the same module.",
    ),
    "other heads": (
        Trial({"layer": {"induction": (0.5, 0.5)}}),
        "trial has 2 heads in layer 'layer'; the recording has 1.\n"
        "    Run the trial on the model of the recording, all heads of it.",
    ),
}


@pytest.mark.parametrize(("trial", "message"), UNFIT_TRIALS.values(), ids=UNFIT_TRIALS)
def test_a_trial_that_does_not_fit_is_refused(trial: Trial, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.heads(recording(looking(at=0)), trial)


# The table


def test_the_table_has_a_row_for_each_head_and_a_column_for_each_score() -> None:
    seen = recording(looking(by=-1), looking(at=3))
    table = regard.heads(seen)
    assert table == head_table(heads_of(seen))
    assert table.names == (
        *("layer", "head", "kind", "score", "previous token", "next token", "self"),
        *("first-token sink", "separator sink", "uniform"),
    )
    assert table["kind"] == ("previous token", "mixed")
    assert [table["layer"], table["head"]] == [(0, 0), (0, 1)]


def test_layers_may_differ_in_their_scores_and_heads() -> None:
    zeros = torch.zeros(2, 7, 1)
    layers = {"a": regard.attend(zeros, zeros), "b": regard.attend(zeros[:1], zeros[:1, :5])}
    table = regard.heads(regard.Recording(layers))
    assert table["self"] == (pytest.approx(1 / 7), pytest.approx(1 / 7), None)
    assert [table["layer"], table["head"]] == [(0, 0, 1), (0, 1, 0)]


# What cannot be classified


def test_weights_that_are_no_numbers_are_refused() -> None:
    matrix = regard.attend(torch.full((3, 1), torch.nan), torch.zeros(3, 1))
    message = (
        "layer 'layer' has weights that are not numbers (NaN); its heads have no kind.\n"
        "    Ask for the layers before it alone, seen.part(names)."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        regard.heads(regard.Recording({"layer": matrix}))


def test_a_layer_without_query_and_key_or_answers_is_refused() -> None:
    seen = regard.Recording({})
    seen.add("layer", None, answers=[(regard.Entropy(), torch.zeros(1, 3))], shape=(1, 3, 3))
    with pytest.raises(regard.RegardError, match="has no answer to NormalizedEntropy"):
        regard.heads(seen)


# Standing out


def test_the_best_head_of_each_kind_stands_out_with_its_reason() -> None:
    heads = [
        Head(0, 0, "next token", 0.61, {}),
        Head(0, 1, "mixed", 0.99, {}),
        Head(3, 2, "next token", 0.8349, {}),
        Head(4, 0, "previous token", 0.5, {}),
        Head(5, 1, "uniform", 0.951, {}),
    ]
    assert [(head.name, reason) for head, reason in stand_out(heads)] == [
        ("L4H0", "puts 50 % of its attention on the token before"),
        ("L3H2", "puts 83 % of its attention on the token after"),
        ("L5H1", "has 95 % of the entropy of even attention"),
    ]


def test_letters_tell_the_kinds_apart() -> None:
    assert len({kind.letter.upper() for kind in KINDS}) == len({kind.name for kind in KINDS}) == 11


def test_a_head_of_words_means_more_than_one_of_positions() -> None:
    positions = {"previous token": 0.95, "uniform": 0.05}
    words = {"previous token": 0.2, "first-token sink": 0.3, "uniform": 0.4}
    of_positions, of_words = (Head(0, 0, "mixed", 0.5, scores) for scores in (positions, words))
    assert meaning(of_positions) == pytest.approx(0.95 * 0.05)
    assert meaning(of_words) == pytest.approx(0.6 * 0.5)
    assert meaning(Head(0, 0, "mixed", 0.5, {})) == 0


def test_a_kind_of_a_trial_says_what_the_head_does_here() -> None:
    scores = {"induction": 0.8, "first-token sink": 0.89, "uniform": 0.1}
    head = Head(3, 1, "induction", 0.8, scores)
    assert stand_out([head])[0][1] == (
        "puts 80 % on what came after the same token before in a trial; here it puts 89 % of its "
        "attention on the first token"
    )
