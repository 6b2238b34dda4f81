"""Kinds of heads, on matrices whose kind is known, and against the definition written out."""

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.heads import KINDS, Head, Spread, classify, stand_out

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


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        pytest.param(looking(by=-1), "previous token", id="previous"),
        pytest.param(looking(by=1), "next token", id="next"),
        pytest.param(looking(by=0), "same token", id="same"),
        pytest.param(looking(at=0), "first token", id="first"),
        pytest.param(looking(at=N - 1), "separator", id="separator"),
        pytest.param(looking(at=3, share=0.0), "spread out", id="spread"),
        pytest.param(looking(at=3), "mixed", id="one word"),
    ],
)
def test_a_head_is_of_the_kind_it_was_made(weights: Tensor, kind: str) -> None:
    [head] = classify(recording(weights))
    assert (head.kind, head.layer, head.head) == (kind, 0, 0)


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_half_of_the_attention_makes_a_kind(share: float) -> None:
    [head] = classify(recording(looking(by=-1, share=share)))
    assert head.kind == ("previous token" if share > 0.5 else "mixed")
    assert head.score == pytest.approx(share + (1 - share) / N)


def test_scores_equal_their_definition() -> None:
    torch.manual_seed(0)
    weights = torch.rand(3, N, N, dtype=torch.float64).softmax(-1)
    text = range(1, N - 1)
    for head, matrix in zip(classify(recording(*weights)), weights.tolist(), strict=True):
        expected = {
            "previous token": mean(matrix[q][q - 1] for q in text if q - 1 in text),
            "next token": mean(matrix[q][q + 1] for q in text if q + 1 in text),
            "same token": mean(matrix[q][q] for q in text),
            "first token": mean(matrix[q][0] for q in text),
            "separator": mean(matrix[q][N - 1] for q in text),
            "spread out": mean(
                -sum(w * math.log(w) for w in matrix[q]) / math.log(N) for q in text
            ),
        }
        assert head.scores == pytest.approx(expected, rel=1e-6)


def mean(values: object) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def test_a_sink_is_no_neighbour() -> None:
    [head] = classify(recording(looking(at=0, share=1.0)))
    assert head.scores["previous token"] == 0
    assert head.scores["first token"] == 1


def test_separators_in_the_middle_of_a_text_count() -> None:
    tokens = [*TOKENS[:3], regard.Token("[SEP]", special=True), *TOKENS[4:]]
    [head] = classify(recording(looking(at=3, share=1.0), tokens=tokens))
    assert head.kind == "separator"


def test_without_tokens_no_token_is_special() -> None:
    [head] = classify(recording(looking(at=N - 1, share=1.0), tokens=None))
    assert head.scores["separator"] == 0


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_texts_have_kinds(length: int) -> None:
    x = torch.zeros(length, 1)
    [head] = classify(regard.Recording({"layer": regard.attend(x, x, mask=regard.Causal())}))
    assert all(0 <= score <= 1 for score in head.scores.values())


def test_layers_may_differ_in_their_number_of_heads() -> None:
    layers = {str(count): regard.attend(torch.zeros(count, 3, 1), torch.zeros(count, 3, 1))
              for count in (2, 1)}  # fmt: skip
    assert [head.name for head in classify(regard.Recording(layers))] == ["L0H0", "L0H1", "L1H0"]


# Spread


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param({"mask": regard.Causal()}, id="mask"),
        pytest.param({"bias": torch.full((5, 5), -65504.0).triu(1)}, id="float16's lowest number"),
        pytest.param({"bias": torch.full((5, 5), -torch.inf).triu(1)}, id="minus infinity"),
    ],
)
def test_even_attention_to_the_keys_that_are_allowed_is_spread_fully(mask: dict) -> None:
    x = torch.zeros(5, 2)
    spread = regard.attend(x, x, **mask).reduce(Spread())
    torch.testing.assert_close(spread, torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]))


def test_a_query_without_keys_is_not_spread() -> None:
    x = torch.zeros(2, 1)
    A = regard.attend(x, x, mask=regard.Keep(torch.tensor([[False, False], [True, True]])))
    torch.testing.assert_close(A.reduce(Spread()), torch.tensor([0.0, 1.0]))


# What cannot be classified


@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        pytest.param(
            regard.attend(torch.zeros(2, 1, 3, 1), torch.zeros(2, 1, 3, 1)),
            ValueError,
            "layer 'layer' has shape (2, 1, 3, 3); one text is looked at, a batch of 1.",
            id="two texts",
        ),
        pytest.param(
            regard.attend(torch.zeros(3, 1), torch.zeros(5, 1)),
            ValueError,
            "layer 'layer' has q_len 3 and kv_len 5; kinds of heads are told for a text that "
            "attends to itself.",
            id="two lengths",
        ),
        pytest.param(
            regard.attend(torch.full((3, 1), torch.nan), torch.zeros(3, 1)),
            regard.RegardError,
            "layer 'layer' has weights that are not numbers (NaN).",
            id="NaN",
        ),
    ],
)
def test_what_has_no_kinds_is_refused(
    matrix: regard.AttentionMatrix, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refusal:
        classify(regard.Recording({"layer": matrix}))
    assert str(refusal.value) == message


# Standing out


def test_the_best_head_of_each_kind_stands_out_with_its_reason() -> None:
    heads = [
        Head(0, 0, "next token", 0.61, {}),
        Head(0, 1, "mixed", 0.99, {}),
        Head(3, 2, "next token", 0.8349, {}),
        Head(4, 0, "previous token", 0.5, {}),
        Head(5, 1, "spread out", 0.951, {}),
    ]
    assert [(head.name, reason) for head, reason in stand_out(heads)] == [
        ("L4H0", "puts 50 % of its attention on the token before"),
        ("L3H2", "puts 83 % of its attention on the token after"),
        ("L5H1", "has 95 % of the entropy of even attention"),
    ]


def test_letters_tell_the_kinds_apart() -> None:
    assert len({kind.letter for kind in KINDS}) == len({kind.name for kind in KINDS}) == 7
