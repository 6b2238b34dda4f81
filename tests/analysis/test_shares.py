"""How much each part of a text drew from each other, with and without sinks, by dense weights."""

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
from regard.analysis.span_shares import (
    _WithoutSinks,  # the question itself, to choose who answers it
)

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


MASKS = [
    pytest.param(None, id="full"),
    pytest.param(regard.Causal(), id="causal"),
    pytest.param(regard.SlidingWindow(2, 0), id="window"),
]

# What is drawn


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [True, False, (2, 9, 10)], ids=["with", "without", "chosen"])
def test_shares_are_those_of_the_dense_weights(mask: regard.Mask | None, sinks: Any) -> None:
    seen = recording(mask=mask)
    out = {True: (), False: (0,)}.get(sinks, sinks)
    answer = regard.segment_shares(seen, PARTS, sinks=sinks)
    torch.testing.assert_close(answer.weights, expected(seen, PARTS, PARTS, out))
    assert answer.sinks == out


@pytest.mark.parametrize("sinks", [True, False])
def test_parts_of_the_queries_may_be_others(sinks: bool) -> None:
    seen = recording()
    queries = {"answer": (8, 11), "first": (0, 1)}
    answer = regard.segment_shares(seen, PARTS, queries=queries, sinks=sinks)
    out = () if sinks else (0,)
    torch.testing.assert_close(answer.weights, expected(seen, queries, PARTS, out))
    assert answer.queries == ("answer", "first")
    assert answer.keys == ("question", "document")


@pytest.mark.parametrize("sinks", [True, False])
def test_attention_to_another_text_has_queries_of_its_own(sinks: bool) -> None:
    seen = regard.Recording({"cross": matrix(q_len=4, kv_len=11)})
    answer = regard.segment_shares(seen, PARTS, queries={"answer": (0, 4)}, sinks=sinks)
    out = () if sinks else (0,)
    torch.testing.assert_close(answer.weights, expected(seen, {"answer": (0, 4)}, PARTS, out))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sink_bias": torch.tensor([1.0, -1.0])}, id="sink bias"),
        pytest.param({"softcap": 2.0}, id="softcap"),
        pytest.param({"bias": torch.linspace(-1, 1, 11)}, id="bias"),
    ],
)
def test_scores_of_every_kind_are_taken_as_they_are(options: dict[str, Any]) -> None:
    seen = recording(**options)
    answer = regard.segment_shares(seen, PARTS, sinks=False)
    torch.testing.assert_close(answer.weights, expected(seen, PARTS, PARTS, (0,)))


@pytest.mark.parametrize("backend", ["dense", "sweep"])
@pytest.mark.parametrize("mask", [regard.Causal(), regard.SlidingWindow(300, 0)], ids=repr)
def test_a_text_of_several_blocks_is_added_up(mask: regard.Mask, backend: str) -> None:
    length = 3000
    A = matrix(num_heads=1, q_len=length, kv_len=length, mask=mask)
    parts = {"a": (0, length // 3), "b": (length // 2, length)}
    spans = tuple(parts.values())
    answer = A.reduce(_WithoutSinks(spans, spans, (0, 3)), backend=backend)
    reference = expected(regard.Recording({"a": A}), parts, parts, (0, 3))[0]
    torch.testing.assert_close(answer[0].float(), reference)


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


def test_a_query_that_attends_to_sinks_alone_is_left_out_of_the_mean() -> None:
    x = torch.zeros(4, 2)
    seen = regard.Recording({"a": regard.attend(x, x, mask=regard.Causal())})
    answer = regard.segment_shares(
        seen, {"all": (0, 4), "start": (0, 1)} | {"all": (1, 4)}, sinks=False
    )
    assert answer.total().tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_sinks_are_the_first_position_and_special_tokens() -> None:
    texts = ["a", " b", "[SEP]", *(f" {place}" for place in range(7)), "[SEP]"]
    tokens = [regard.Token(text, special=text == "[SEP]") for text in texts]
    assert regard.segment_shares(recording().with_tokens(tokens), PARTS, sinks=False).sinks == (
        0,
        2,
        10,
    )


def test_the_first_position_is_the_first_that_is_no_padding() -> None:
    real = torch.arange(11) >= 3
    pad = [regard.Token("<pad>", special=True)] * 3
    tokens = [*pad, *map(regard.Token, "abcdefg"), regard.Token("[SEP]", special=True)]
    seen = recording(mask=regard.Causal() & regard.Keep(real)).with_tokens(tokens)
    parts = {"a": (4, 7), "b": (7, 10)}
    answer = regard.segment_shares(seen, parts, sinks=False)
    assert answer.sinks == (3, 10)
    torch.testing.assert_close(answer.weights, expected(seen, parts, parts, (3, 10)))


def test_a_matrix_without_heads_is_one_head() -> None:
    A = regard.attend(torch.zeros(4, 2), torch.zeros(4, 2))
    weights = regard.segment_shares(regard.Recording({"a": A}), {"a": (0, 2)}).weights
    assert weights.tolist() == [[[[0.5]]]]


def test_a_kept_answer_is_the_answer() -> None:
    A = matrix()
    seen = regard.Recording({})
    question = regard.Segments(PARTS)
    seen.add("a", None, answers=[(question, A.reduce(question))], shape=A.shape)
    torch.testing.assert_close(regard.segment_shares(seen, PARTS).weights[0], A.segments(PARTS)[0])


def test_only_the_rows_of_the_parts_are_computed() -> None:
    asked: list[range] = []

    class Asked(regard.Reduction):
        """Which rows the block has that it shares with Segments."""

        def rows(self, q_len: int) -> range:
            return range(0)

        def start(self, shape: Any, dtype: Any, device: Any) -> tuple[Tensor, ...]:
            return ()

        def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
            asked.append(range(block.box.rows.start, block.box.rows.stop))
            return ()

        def finish(self, buffers: Any, shape: Any) -> None:
            return None

    parts = {"b": (5, 7), "a": (2, 3)}
    A = matrix(num_heads=1)
    A.reduce(regard.Segments(parts), Asked())
    A.reduce(_WithoutSinks(tuple(parts.values()), ((0, 1),), (0,)), Asked())
    assert asked == [range(2, 7)] * 2


def test_the_progress_is_told_after_each_layer() -> None:
    told: list[tuple[int, int]] = []
    regard.segment_shares(recording(), PARTS, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]


# How it is shown


def test_the_total_is_the_mean_over_layers_and_heads() -> None:
    answer = regard.segment_shares(recording(), PARTS)
    torch.testing.assert_close(answer.total(), answer.weights.mean((0, 1)))


def test_its_table_has_a_row_for_each_pair_of_parts_and_head() -> None:
    answer = regard.segment_shares(recording(), PARTS)
    table = answer.table()
    assert table.names == ("layer", "head", "query", "key", "share")
    assert len(table) == 2 * 2 * 2 * 2
    assert table.records()[9] == {
        "layer": 1,
        "head": 0,
        "query": "question",
        "key": "document",
        "share": answer.weights[1, 0, 0, 1].item(),
    }


def test_its_table_per_layer_has_the_mean_over_heads() -> None:
    answer = regard.segment_shares(recording(), PARTS)
    table = answer.table("layer")
    assert table.names == ("layer", "query", "key", "share")
    assert table.records()[-1] == {
        "layer": 1,
        "query": "document",
        "key": "document",
        "share": answer.weights[1, :, 1, 1].mean().item(),
    }


def test_its_table_in_total_has_the_mean_over_all() -> None:
    answer = regard.segment_shares(recording(), PARTS)
    table = answer.table("total")
    assert table.names == ("query", "key", "share")
    assert table["share"] == tuple(answer.total().flatten().tolist())


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


def test_sinks_of_numpy_s_whole_numbers_are_sinks() -> None:
    sinks: Any = [numpy.int64(9), 2]
    assert regard.segment_shares(recording(), PARTS, sinks=sinks).sinks == (2, 9)


def test_spans_of_numpy_s_whole_numbers_are_spans() -> None:
    spans = {name: tuple(numpy.array(span)) for name, span in PARTS.items()}
    for sinks in (True, False):
        ours, theirs = (
            regard.segment_shares(recording(), parts, sinks=sinks) for parts in (PARTS, spans)
        )
        assert torch.equal(ours.weights, theirs.weights)


def test_of_many_parts_it_shows_the_first_eight() -> None:
    parts = {f"a part with quite a long name {place}": (place, place + 1) for place in range(11)}
    lines = repr(regard.segment_shares(recording(), parts, queries={"all": (0, 11)})).splitlines()
    assert lines[0] == "Shares of 2 layers with 2 heads; the mean over all of them:"
    assert lines[1].count("a part with quite a lon") == 8
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


@pytest.mark.parametrize(
    ("asked", "names", "has"),
    [
        pytest.param(PARTS, ["doc"], "'question', 'document'", id="no such part"),
        pytest.param({"answer": (8, 9)}, ["answer"], "'answer'", id="no other part"),
        pytest.param(
            {"a": (0, 1), **PARTS},
            ["a", "question"],
            "beyond 'a', of 'question', 'document'",
            id="differences already",
        ),
    ],
)
def test_beyond_no_part_is_an_error(asked: dict[str, Any], names: list[str], has: str) -> None:
    drawn = regard.segment_shares(recording(), PARTS, queries=asked)
    for name in names[:-1]:
        drawn = drawn.beyond(name)
    message = (
        f"query is {names[-1]!r}; the shares are {has}, and it must be one of several.\n"
        '    Ask for both, segments(parts, queries={"before": ..., "answer": ...}), then '
        '.beyond("before").'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        drawn.beyond(names[-1])


# What cannot be asked

OF_KEYS = (
    "\n    Give {name: (start, stop)} with 0 <= start < stop <= kv_len = 11, "
    "or regard.spans.by_sentence(tokens)."
)
OF_QUERIES = OF_KEYS.replace("kv_len", "q_len")
OF_SINKS = "\n    Give positions from 0 to kv_len - 1; False takes the first and special tokens."


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        pytest.param(
            {"parts": [(0, 1)]},
            TypeError,
            "parts is a list; it must be a mapping from names to spans." + OF_KEYS,
            id="no mapping",
        ),
        pytest.param(
            {"parts": {}},
            ValueError,
            "parts is empty; it must have at least one part." + OF_KEYS,
            id="no parts",
        ),
        pytest.param(
            {"parts": {0: (0, 1)}},
            TypeError,
            "parts has the name 0, an int; each must be a string." + OF_KEYS,
            id="a name that is no string",
        ),
        pytest.param(
            {"parts": {"doc": (0, 1.5)}},
            TypeError,
            "parts has (0, 1.5) for 'doc'; each span must be two whole numbers." + OF_KEYS,
            id="no whole numbers",
        ),
        pytest.param(
            {"parts": {"doc": 3}},
            TypeError,
            "parts has 3 for 'doc'; each span must be two whole numbers." + OF_KEYS,
            id="no pair",
        ),
        pytest.param(
            {"parts": {"doc": (4, 4)}},
            ValueError,
            "parts has (4, 4) for 'doc', which is empty; each span must hold at least one token."
            + OF_KEYS,
            id="empty",
        ),
        pytest.param(
            {"parts": {"doc": (4, 12)}},
            ValueError,
            "parts has (4, 12) for 'doc'; each span must lie within the text." + OF_KEYS,
            id="beyond the text",
        ),
        pytest.param(
            {"parts": {"doc": (-2, 3)}},
            ValueError,
            "parts has (-2, 3) for 'doc'; each span must lie within the text." + OF_KEYS,
            id="before the text",
        ),
        pytest.param(
            {"parts": {"b": (4, 9), "a": (0, 5)}},
            ValueError,
            "parts has (0, 5) for 'a' and (4, 9) for 'b', which overlap; parts must lie apart, so "
            "that no weight counts twice.\n    Ask twice, once for each.",
            id="overlapping",
        ),
        pytest.param(
            {"queries": {"answer": (9, 20)}},
            ValueError,
            "queries has (9, 20) for 'answer'; each span must lie within the text." + OF_QUERIES,
            id="queries beyond the text",
        ),
        pytest.param(
            {"progress": 3},
            TypeError,
            "progress is an int; it must be a function of two numbers, done and total.\n"
            "    Pass for example progress=print.",
            id="progress that cannot be called",
        ),
        pytest.param(
            {"sinks": 0},
            TypeError,
            "sinks is 0; it must be True, False or whole numbers, at least one." + OF_SINKS,
            id="sinks that are no positions",
        ),
        pytest.param(
            {"sinks": []},
            TypeError,
            "sinks is []; it must be True, False or whole numbers, at least one." + OF_SINKS,
            id="no sinks",
        ),
        pytest.param(
            {"sinks": [3, 11]},
            ValueError,
            "sinks has 11; each must be a position, with kv_len = 11." + OF_SINKS,
            id="a sink beyond the text",
        ),
    ],
)
def test_what_cannot_be_asked_is_an_error(
    asked: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        regard.segment_shares(recording(), **{"parts": PARTS, **asked})


APART = "\n    Ask for them apart, regard.segment_shares(seen.part(names))."


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        pytest.param(
            regard.Recording({}),
            "this recording has no layers yet; segment_shares() needs at least one.\n"
            "    Run the model inside the block of regard.observe first.",
            id="no layers",
        ),
        pytest.param(
            regard.Recording({"a": matrix(q_len=4)}),
            "queries is None; it must be given where q_len = 4 and kv_len = 11 differ.\n"
            "    Give the parts of the queries, {name: (start, stop)}, counted from the first "
            "query that was kept.",
            id="another text without queries",
        ),
        pytest.param(
            regard.Recording({"a": matrix(), "b": matrix(num_heads=3)}),
            "layer 'b' has shape (1, 3, 11, 11) and 'a' has (1, 2, 11, 11); num_heads, q_len and "
            "kv_len must be equal." + APART,
            id="layers of several shapes",
        ),
        pytest.param(
            regard.Recording(
                {"a": regard.attend(torch.zeros(3, 1, 9, 2), torch.zeros(3, 1, 9, 2))}
            ),
            "layer 'a' has shape (3, 1, 9, 9); segment_shares() looks at one text, a batch of 1.\n"
            "    Take one of them, seen.entry(0).",
            id="several texts",
        ),
    ],
)
def test_layers_that_cannot_be_asked_are_an_error(seen: regard.Recording, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(seen, {"a": (0, 2)})


def test_an_unknown_mean_is_an_error() -> None:
    message = (
        "per is 'text'; it must be 'head', 'layer' or 'total'.\n"
        "    It says over what the mean is taken: nothing, heads, layers and heads."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(recording(), PARTS).table("text")  # type: ignore[arg-type]
