"""Attention between the parts of a text, with and without sinks, against dense weights."""

import re
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.recording.layers import Queries

PARTS = {"question": (1, 3), "document": (3, 8)}


def matrix(
    num_heads: int = 2, q_len: int = 11, kv_len: int = 11, seed: int = 0, **options: Any
) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, num_heads, q_len, 5, generator=generator)
    key = torch.randn(1, num_heads, kv_len, 5, generator=generator)
    return regard.attend(query, key, **options)


def recording(**options: Any) -> regard.Recording:
    return regard.Recording({"a": matrix(seed=1, **options), "b": matrix(seed=2, **options)})


def expected(
    seen: regard.Recording,
    queries: dict[str, tuple[int, int]],
    keys: dict[str, tuple[int, int]],
    sinks: tuple[int, ...] = (),
) -> Tensor:
    """The same in float64 from dense weights, one number at a time."""
    answer = torch.zeros(len(seen), seen[0].shape[-3], len(queries), len(keys))
    for layer, A in enumerate(seen.values()):
        weights = A.to_dense().double()[0]
        if sinks:
            weights[..., list(sinks)] = 0
            weights = weights / weights.sum(-1, keepdim=True)
        for i, (start, stop) in enumerate(queries.values()):
            for j, (first, last) in enumerate(keys.values()):
                by_query = weights[:, start:stop, first:last].sum(-1)
                answer[layer, :, i, j] = by_query.nanmean(-1)
    return answer


# The shares


@pytest.mark.parametrize("mask", [None, regard.Causal(), regard.SlidingWindow(2, 0)], ids=repr)
@pytest.mark.parametrize("sinks", [True, False, (2, 9, 10)], ids=["with", "without", "chosen"])
def test_shares_are_those_of_the_dense_weights(mask: regard.Mask | None, sinks: Any) -> None:
    seen = recording(mask=mask)
    out = {True: (), False: (0,)}.get(sinks, sinks)
    answer = regard.segment_shares(seen, PARTS, sinks=sinks)
    torch.testing.assert_close(answer.weights, expected(seen, PARTS, PARTS, out))
    assert answer.sinks == out


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("q_len", [11, 4])
def test_parts_of_the_queries_may_be_others(q_len: int, sinks: bool) -> None:
    seen = regard.Recording({"a": matrix(q_len=q_len)})
    queries = {"answer": (q_len - 3, q_len), "first": (0, 1)}
    answer = regard.segment_shares(seen, PARTS, queries=queries, sinks=sinks)
    out = () if sinks else (0,)
    torch.testing.assert_close(answer.weights, expected(seen, queries, PARTS, out))
    assert answer.queries == ("answer", "first")
    assert answer.keys == ("question", "document")


SCORES: dict[str, Any] = {
    "sink bias": {"sink_bias": torch.tensor([1.0, -1.0])},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": torch.linspace(-1, 1, 11)},
}


@pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)
def test_shares_without_sinks_are_right_for_every_kind_of_score(options: dict[str, Any]) -> None:
    seen = recording(**options)
    answer = regard.segment_shares(seen, PARTS, sinks=False)
    torch.testing.assert_close(answer.weights, expected(seen, PARTS, PARTS, (0,)))


@pytest.mark.parametrize("mask", [regard.Causal(), regard.SlidingWindow(300, 0)], ids=repr)
def test_a_text_of_several_blocks_is_added_up(mask: regard.Mask) -> None:
    length = 3000
    A = matrix(num_heads=1, q_len=length, kv_len=length, mask=mask)
    parts = {"a": (0, length // 3), "b": (length // 2, length)}
    seen = regard.Recording({"a": A})
    answer = regard.segment_shares(seen, parts, sinks=(0, 3))
    torch.testing.assert_close(answer.weights, expected(seen, parts, parts, (0, 3)))


@given(
    edges=st.lists(st.integers(0, 11), min_size=2, max_size=6, unique=True).map(sorted),
    sinks=st.lists(st.integers(0, 10), min_size=1, max_size=4, unique=True),
)
def test_without_sinks_whole_parts_sum_to_1(edges: list[int], sinks: list[int]) -> None:
    spans = [(0, edges[0]), *pairwise(edges), (edges[-1], 11)]
    parts = {str(span): span for span in spans if span[0] < span[1]}
    weights = regard.segment_shares(recording(), parts, sinks=sinks).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_a_sink_that_takes_all_leaves_the_rest_to_be_compared() -> None:
    scores = torch.tensor([[400.0, 1.0, 2.0], [400.0, 0.0, 0.0], [400.0, 2.0, 1.0]])
    seen = regard.Recording({"a": regard.AttentionMatrix.from_scores(scores)})
    weights = regard.segment_shares(seen, {"first": (1, 2), "second": (2, 3)}, sinks=False).weights
    share = torch.sigmoid(torch.tensor(1.0))
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(weights[0, 0, 1], torch.stack([share, 1 - share]))


@pytest.mark.parametrize("mask", ["causal", "the lowest number"])
def test_a_query_that_attends_to_sinks_alone_is_left_out_of_the_mean(mask: str) -> None:
    x = torch.zeros(4, 2)
    bias = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    options = {"mask": regard.Causal()} if mask == "causal" else {"bias": bias}
    seen = regard.Recording({"a": regard.attend(x, x, **options)})
    parts = {"rest": (1, 4), "start": (0, 1)}
    answer = regard.segment_shares(seen, parts, sinks=False)
    assert answer.total().tolist() == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(("padding", "sinks"), [(0, (0, 2, 10)), (3, (3, 10))])
def test_sinks_are_the_first_position_of_the_text_and_special_tokens(
    padding: int, sinks: tuple[int, ...]
) -> None:
    tokens = [regard.Token(text, special=text == "S") for text in "abSdefghijS"]
    mask = regard.Causal() & regard.Keep(torch.arange(11) >= padding)
    seen, parts = recording(mask=mask).with_tokens(tokens), {"a": (4, 7), "b": (7, 10)}
    answer = regard.segment_shares(seen, parts, sinks=False)
    assert answer.sinks == sinks
    torch.testing.assert_close(answer.weights, expected(seen, parts, parts, sinks))


def test_a_matrix_without_heads_is_one_head() -> None:
    A = regard.attend(torch.zeros(4, 2), torch.zeros(4, 2))
    weights = regard.segment_shares(regard.Recording({"a": A}), {"a": (0, 2)}).weights
    assert weights.tolist() == [[[[0.5]]]]


def test_progress_is_called_after_each_layer() -> None:
    calls: list[tuple[int, int]] = []
    regard.segment_shares(recording(), PARTS, progress=lambda *call: calls.append(call))
    assert calls == [(1, 2), (2, 2)]


# Recordings with answers only


def kept(*answers: regard.Reduction) -> regard.Recording:
    A = matrix()
    seen = regard.Recording({})
    seen.add("a", None, answers=[(each, A.reduce(each)) for each in answers], shape=A.shape)
    return seen


def test_a_recorded_answer_is_used() -> None:
    lists: Any = {name: list(span) for name, span in PARTS.items()}
    for parts, queries in ((PARTS, None), (lists, PARTS)):
        shares = regard.segment_shares(kept(regard.Segments(PARTS)), parts, queries=queries)
        torch.testing.assert_close(shares.weights[0], matrix().segments(PARTS)[0])


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (True, "layer 'a' has no answer to Segments(...), and its query and key were not kept"),
        (False, "layer 'a' has answers only, Entropy(); its query and key were not kept"),
    ],
)
def test_an_answer_that_was_not_recorded_is_an_error(sinks: bool, message: str) -> None:
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}"):
        regard.segment_shares(kept(regard.Entropy()), PARTS, sinks=sinks)


# How it is shown


@pytest.mark.parametrize(
    ("per", "axes", "owner"),
    [
        ("head", (), {"layer": 1, "head": 0}),
        ("layer", 1, {"layer": 1}),
        ("total", (0, 1), {}),
    ],
)
def test_its_table_has_a_row_for_each_pair_of_parts(per: Any, axes: Any, owner: Any) -> None:
    answer = regard.segment_shares(recording(), PARTS)
    mean = answer.weights.mean(axes) if axes else answer.weights
    table = answer.table(per)
    assert table.names == (*owner, "query", "key", "share")
    assert table["share"] == tuple(mean.flatten().tolist())
    row = {**owner, "query": "question", "key": "document"}
    share = mean[tuple(owner.values())][0, 1].item()
    assert {**row, "share": share} in table.records()
    torch.testing.assert_close(answer.total(), answer.weights.mean((0, 1)))


def test_it_shows_the_mean_with_queries_down_and_keys_across() -> None:
    x = torch.zeros(1, 1, 8, 2)
    seen = regard.Recording({"a": regard.attend(x, x)})
    answer = regard.segment_shares(
        seen, {"a": (1, 3), "b": (3, 8)}, queries={"answer": (5, 8)}, sinks=False
    )
    assert repr(answer).splitlines() == [
        "Shares of 1 layer with 1 head, without 1 sink; the mean over all of them:",
        "             a       b",
        "answer  0.2857  0.7143",
    ]


def test_whole_numbers_of_numpy_are_positions() -> None:
    spans = {name: tuple(numpy.array(span)) for name, span in PARTS.items()}
    sinks: Any = [numpy.int64(9), 2]
    ours, theirs = (
        regard.segment_shares(recording(), parts, sinks=sinks) for parts in (PARTS, spans)
    )
    assert torch.equal(ours.weights, theirs.weights)
    assert ours.sinks == theirs.sinks == (2, 9)


def test_of_many_parts_it_shows_the_first_eight() -> None:
    parts = {f"part {index}": (index, index + 1) for index in range(11)}
    lines = repr(regard.segment_shares(recording(), parts, queries={"all": (0, 11)})).splitlines()
    assert lines[0] == "Shares of 2 layers with 2 heads; the mean over all of them:"
    assert re.findall(r"part \d+", lines[1]) == [f"part {index}" for index in range(8)]
    assert lines[-1] == "... 3 more parts of the keys, in .table('total')"


# Beyond those of one part


@pytest.mark.parametrize("sinks", [True, False])
def test_beyond_a_part_each_share_is_what_is_more(sinks: bool) -> None:
    asked = {"before": (0, 4), "question": (4, 9), "answer": (9, 11)}
    drawn = regard.segment_shares(recording(), PARTS, queries=asked, sinks=sinks)
    more = drawn.beyond("question")
    every = expected(recording(), asked, PARTS, () if sinks else (0,))
    assert (more.queries, more.keys, more.over) == (("before", "answer"), drawn.keys, "question")
    difference = every[:, :, [0, 2]] - every[:, :, [1]]
    torch.testing.assert_close(more.weights, difference, atol=1e-6, rtol=0)
    assert more.table("total")["share"] == tuple(more.weights.mean((0, 1)).flatten().tolist())


def test_what_every_query_attends_to_alike_falls_out() -> None:
    weights = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.125, 0.5, 0.375]])
    A = regard.AttentionMatrix.from_weights(weights)
    asked = {"question": (0, 2), "answer": (2, 3)}
    parts = {"first": (0, 1), "no listed sink": (1, 2), "last": (2, 3)}
    drawn = regard.segment_shares(regard.Recording({"a": A}), parts, queries=asked)
    assert drawn.total()[1].argmax() == 1
    beyond = drawn.beyond("question").total()[0]
    assert beyond.tolist() == pytest.approx([-0.125, 0, 0.125], abs=1e-6)
    assert repr(drawn.beyond("question")).splitlines() == [
        "Shares of 1 layer with 1 head, beyond those of 'question'; the mean over all of them:",
        "          first  no listed sink    last",
        "answer  -0.1250          0.0000  0.1250",
    ]


BEYOND_NOTHING = {
    "no such part": (PARTS, ["doc"], "'question', 'document'"),
    "no other part": ({"answer": (8, 9)}, ["answer"], "'answer'"),
    "differences already": (
        {"a": (0, 1), **PARTS},
        ["a", "question"],
        "'question', 'document' beyond 'a'",
    ),
}


@pytest.mark.parametrize(("asked", "names", "parts"), BEYOND_NOTHING.values(), ids=BEYOND_NOTHING)
def test_beyond_no_part_is_an_error(asked: dict[str, Any], names: list[str], parts: str) -> None:
    drawn = regard.segment_shares(recording(), PARTS, queries=asked)
    for name in names[:-1]:
        drawn = drawn.beyond(name)
    message = (
        f"query is {names[-1]!r}; it must be one of several parts of plain shares, not of {parts}."
        '\n    Ask for both, queries={"before": ..., "answer": ...}.'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        drawn.beyond(names[-1])


# Errors

SPANS = "\n    Give (start, stop) pairs with 0 <= start < stop <= {} = 11."
WRONG_ARGUMENTS = {
    "parts is a list; it must be a mapping from names to spans.\n"
    '    Give {"question": (0, 9)}, or regard.spans.by_sentence(tokens).': {"parts": [(0, 1)]},
    f"parts is empty; it must have at least one span.{SPANS.format('kv_len')}": {"parts": {}},
    "parts has (0, 5) for 'a' and (4, 9) for 'b', which overlap; parts must lie apart, so that no "
    "weight counts twice.\n    Ask twice, once for each.": {"parts": {"b": (4, 9), "a": (0, 5)}},
    "queries has (9, 20); each span must be non-empty and inside the text."
    + SPANS.format("q_len"): {"queries": {"answer": (9, 20)}},
    "progress is an int; it must be a function of two numbers, done and total.\n"
    "    Pass for example progress=print.": {"progress": 3},
    "index 11 is out of range for axis -1 of length 11.\n    Use -11 to 10.": {"sinks": [3, 11]},
}


@pytest.mark.parametrize(("message", "asked"), WRONG_ARGUMENTS.items())
def test_what_cannot_be_asked_is_an_error(message: str, asked: dict[str, Any]) -> None:
    errors = (TypeError, ValueError, IndexError)
    with pytest.raises(errors, match=f"^{re.escape(message)}$"):
        regard.segment_shares(recording(), **{"parts": PARTS, **asked})


def of_queries(*starts: int) -> regard.Recording:
    """Layers of which four queries were recorded, from each of these positions."""
    seen = regard.Recording({})
    for start in starts:
        seen.add("a", matrix(q_len=4), queries=Queries(start=start, ran=11))
    return seen


DIFFERENT = (
    "queries is None; it must be given where queries and keys are different texts, or the parts "
    "have no recorded query: 0 to {}, with kv_len = 11.\n    Give the parts of the queries, "
    "{{name: (start, stop)}}, counted from the first query that was kept."
)


WRONG_LAYERS = {
    "no layers": (
        regard.Recording({}),
        "this recording has no layers yet; segment_shares() needs at least one.\n"
        "    Run the model inside the block of regard.observe first.",
    ),
    "another length": (regard.Recording({"a": matrix(q_len=4)}), DIFFERENT.format(3)),
    "other tokens": (
        regard.Recording({"a": matrix()}).with_tokens(list("abcdefghijk"), list("cbadefghijk")),
        DIFFERENT.format(10),
    ),
    "other queries": (of_queries(0, 2), DIFFERENT.format(3)),
    "layers of several shapes": (
        regard.Recording({"a": matrix(), "b": matrix(num_heads=3)}),
        "layer 'b' has shape (1, 3, 11, 11) and 'a' has (1, 2, 11, 11); num_heads, q_len and "
        "kv_len must be equal.\n"
        "    Ask for them apart, regard.segment_shares(seen.part(names)).",
    ),
    "several texts": (
        regard.Recording({"a": regard.attend(torch.zeros(3, 1, 9, 2), torch.zeros(3, 1, 9, 2))}),
        "layer 'a' has shape (3, 1, 9, 9); segment_shares() looks at one text, a batch of 1.\n"
        "    Take one of them, seen.entry(0).",
    ),
}


@pytest.mark.parametrize(("seen", "message"), WRONG_LAYERS.values(), ids=WRONG_LAYERS)
def test_layers_that_cannot_be_asked_are_an_error(seen: regard.Recording, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(seen, {"a": (0, 2)})


def test_an_unknown_mean_is_an_error() -> None:
    message = "per is 'text'; it must be 'head', 'layer' or 'total'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(recording(), PARTS).table("text")  # type: ignore[arg-type]
