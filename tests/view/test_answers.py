"""What server and notebook answer the page: exact numbers of every kind of matrix, at any scale."""

import threading
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import CASES, Case, parametrised
from oracle import assert_close
from regard.scores.box import Box
from regard.scores.query_key import QueryKeyScores
from regard.view.tiles import head_tiles
from regard.view.tiles.head_tiles import Place, WrongQuestionError, highest_level
from regard.view.tiles.page_answers import Answers, Gone
from regard.view.tiles.protocol import OfHead, ProgressAnswer


@pytest.fixture(params=["at once", "in the background"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to an answer: small heads at once, and long ones with a pass beside them.

    Tiles are so small that even a small head has several levels, of which some are added up.
    """
    monkeypatch.setattr(head_tiles, "TILE", 16)
    monkeypatch.setattr(head_tiles, "_FIRST_BASE", 1)
    if request.param == "in the background":
        long_heads(monkeypatch)
    return request.param


def long_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head is a long one; a pass has many strips."""
    monkeypatch.setattr(head_tiles, "AT_ONCE", 0)
    monkeypatch.setattr(head_tiles, "STRIP_SCORES", 2**10)
    monkeypatch.setattr(head_tiles, "_WINDOW_SCORES", 2**7)


def exact_heads(case: Case) -> tuple[Tensor, Tensor]:
    """Scores and weights of the first sequence by the oracle, (num_heads, q_len, kv_len)."""
    dense = case.dense(*map(oracle.double, case.inputs.of_scores))
    size = dense.weights.shape[-3:] if dense.weights.ndim > 2 else (1, *dense.weights.shape)
    first = (0,) * (dense.weights.ndim - 3)
    return dense.scores.expand_as(dense.weights)[first].view(size), dense.weights[first].view(size)


def budget(case: Case, exact: Tensor) -> float:
    """What the oracle allows for a weight in float32."""
    plain, scores = exact.float(), case.largest_score
    return oracle.allowed_error(exact, plain, dtype=torch.float32, scores=scores)


def cells(weights: Tensor, level: int) -> Tensor:
    """The mean of each block of 2^level x 2^level weights, of what exists at the edges."""
    size = 1 << level
    rows = [part.mean(0) for part in weights.split(size, 0)]
    blocks = [part.mean(-1) for part in torch.stack(rows).split(size, -1)]
    return torch.stack(blocks, -1)


def finished(answers: Answers, which: OfHead) -> None:
    for _ in range(2000):
        if answers.progress(which).done == 1:
            return
        threading.Event().wait(0.005)
    raise AssertionError("the pass never came to its end")


def recording(matrix: regard.AttentionMatrix, **more: object) -> regard.Recording:
    return regard.Recording({"layer": matrix}, **more)


# Every kind of matrix


@pytest.mark.sampled(64)
@parametrised(CASES)
def test_rows_and_columns_and_tiles_are_the_matrix_s(case: Case, way: str) -> None:
    scores, weights = exact_heads(case)
    with Answers(recording(case.matrix(*case.inputs.of_scores))) as answers:
        for head in {0, len(weights) - 1}:
            which, exact = OfHead(0, head), weights[head]
            within = budget(case, exact)
            query, key = exact.shape[0] // 2, exact.shape[1] // 3
            row = answers.row(which, query)
            assert_close(row.values, exact[query], within)
            assert torch.equal(row.mask, scores[head, query] != -torch.inf)
            assert_close(answers.column(which, key), exact[:, key], within)
            finished(answers, which)
            assert_tiles(answers, which, exact, within)


def assert_tiles(answers: Answers, which: OfHead, exact: Tensor, within: float) -> None:
    """Every tile of every level is exact, and says so."""
    for level in range(highest_level(exact.shape) + 1):
        whole = cells(exact, level)
        tiles = product(*(range(-(-n // head_tiles.TILE)) for n in whole.shape))
        for row, column in tiles:
            tile = answers.tile(which, Place(level, row, column))
            down, across = (
                slice(at * head_tiles.TILE, (at + 1) * head_tiles.TILE) for at in (row, column)
            )
            assert (tile.exact, tile.sampled) == (True, None)
            assert_close(tile.values, whole[down, across], within)


@parametrised([case for case in CASES if case.dtype == torch.float32 and case.sharp == 1])
def test_hidden_sinks_are_set_aside_and_rows_sum_to_one(case: Case) -> None:
    scores, _ = exact_heads(case)
    allowed = torch.arange(scores.shape[-1]) > 0
    exact = oracle.softmax(scores[0], allowed).weights
    with Answers(recording(case.matrix(*case.inputs.of_scores))) as answers:
        tile = answers.tile(OfHead(0, 0, hidden=True), Place(0, 0, 0))
    within = budget(case, exact)
    assert_close(tile.values, exact[:256, :256], within)


KINDS: dict[str, Callable[[], regard.AttentionMatrix]] = {
    "causal": lambda: attended(140, 140, mask=regard.Causal()),
    "more keys": lambda: attended(60, 161, mask=regard.Causal()),
    "fewer keys": lambda: attended(161, 18, mask=regard.Causal(align="top-left")),
    "window": lambda: attended(140, 140, mask=regard.SlidingWindow(20, 3)),
    "empty rows": lambda: attended(70, 70, mask=regard.Keep(torch.arange(70)[:, None] % 3 > 0)),
    "sinks": lambda: attended(70, 70, sink_bias=torch.tensor([2.0])),
    "scores": lambda: regard.AttentionMatrix.from_scores(torch.randn(1, 58, 62).tril()),
    "weights": lambda: regard.AttentionMatrix.from_weights(torch.eye(70)[None]),
    "close at 40,000": lambda: regard.AttentionMatrix.from_scores(
        40_000 + torch.arange(58 * 62).reshape(1, 58, 62) % 17.0
    ),
    "equal at -1e9": lambda: regard.AttentionMatrix.from_scores(torch.full((1, 58, 62), -1e9)),
    "bfloat16": lambda: attended(70, 70, dtype=torch.bfloat16),
    "float64": lambda: attended(70, 70, dtype=torch.float64),
}


def attended(
    q_len: int, kv_len: int, dtype: torch.dtype = torch.float32, **options: object
) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(q_len)
    query, key = (torch.randn(1, n, 8, generator=generator).to(dtype) for n in (q_len, kv_len))
    return regard.attend(query, key, **options)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_every_level_are_means_of_blocks(kind: str, way: str) -> None:
    matrix = KINDS[kind]()
    exact = matrix.to(torch.float64).to_dense()[0]
    which = OfHead(0, 0)
    with Answers(recording(matrix)) as answers:
        finished(answers, which)
        assert_tiles(answers, which, exact, 4e-6 * float(exact.max()))


def test_the_levels_of_a_whole_number_of_cells_are_the_library_s_pool(way: str) -> None:
    matrix = attended(64, 32, mask=regard.Causal())
    with Answers(recording(matrix)) as answers:
        finished(answers, OfHead(0, 0))
        tile = answers.tile(OfHead(0, 0), Place(2, 0, 0))
    torch.testing.assert_close(tile.values, matrix.pool(16, 8)[0], rtol=1e-5, atol=1e-8)


# A long head


def test_until_the_pass_is_through_a_tile_is_a_sample_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_heads(monkeypatch)
    matrix = attended(600, 600, mask=regard.Causal())
    with Answers(recording(matrix)) as answers:
        tile = answers.tile(OfHead(0, 0), Place(2, 0, 0))
    exact = matrix.to_dense()[0]
    middles = [(start + min(start + 4, 600)) // 2 for start in range(0, 600, 4)]
    assert (tile.exact, tile.sampled) == (False, 4)
    assert_close(tile.values, cells(exact[middles].repeat_interleave(4, 0), 2).double(), 1e-6)


@pytest.mark.parametrize("hidden", [False, True], ids=["all", "hidden"])
@pytest.mark.parametrize("kind", ["bias that depends on places", "bias", "causal", "window"])
def test_a_sample_has_every_step_of_the_scores(
    kind: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_heads(monkeypatch)
    options: dict[str, dict[str, object]] = {
        "bias that depends on places": {"bias": regard.ALiBi(torch.tensor([0.1]))},
        "bias": {"bias": torch.randn(1, 300, 300, generator=torch.Generator().manual_seed(1))},
        "causal": {"mask": regard.Causal()},
        "window": {"mask": regard.SlidingWindow(40, 5)},
    }
    matrix = attended(300, 300, sink_bias=torch.tensor([1.5]), **options[kind])
    with Answers(recording(matrix)) as answers:
        tile = answers.tile(OfHead(0, 0, hidden), Place(1, 0, 0))
    exact = matrix.to(torch.float64).to_dense()[0]
    if hidden:
        scores = matrix.to(torch.float64).scores.to_dense()[0]
        exact = oracle.softmax(scores, torch.arange(300) > 0).weights
    middles = torch.arange(1, 300, 2)
    assert (tile.exact, tile.sampled) == (False, 2)
    assert_close(tile.values, cells(exact[middles].repeat_interleave(2, 0), 1), 1e-6)


def test_a_sample_multiplies_every_key_by_many_queries_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_heads(monkeypatch)
    sizes: list[int] = []
    block = QueryKeyScores.block

    def counted(self: QueryKeyScores, box: Box, *more: Any) -> Tensor:
        sizes.append(box.size[-2])
        return block(self, box, *more)

    monkeypatch.setattr(QueryKeyScores, "block", counted)
    with Answers(recording(attended(600, 600, mask=regard.Causal()))) as answers:
        assert not answers.tile(OfHead(0, 0), Place(2, 0, 0)).exact
        assert sizes[:11] == [*[16] * 9, 5, 1]  # 150 queries, the last one by itself


def test_a_long_column_waits_for_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    long_heads(monkeypatch)
    matrix = attended(600, 600, mask=regard.Causal())
    with Answers(recording(matrix)) as answers:
        column = answers.column(OfHead(0, 0), 7)
        assert answers.progress(OfHead(0, 0)).done == 1
    torch.testing.assert_close(column, matrix[0, :, 7])


def test_a_head_is_passed_as_far_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    long_heads(monkeypatch)
    matrix = regard.attend(torch.randn(2, 900, 8), torch.randn(2, 900, 8))
    with Answers(recording(matrix)) as answers:
        first = answers.progress(OfHead(0, 0)).done
        answers.column(OfHead(0, 1), 0)
        assert answers.progress(OfHead(0, 1)) == ProgressAnswer(done=1.0, seconds=0.0)
        assert first < answers.progress(OfHead(0, 0)).done < 1  # as far as it was asked for
        finished(answers, OfHead(0, 0))


def test_progress_rises_and_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    long_heads(monkeypatch)
    seen: list[ProgressAnswer] = []
    with Answers(recording(attended(900, 900))) as answers:
        while not seen or seen[-1].done < 1:
            seen.append(answers.progress(OfHead(0, 0)))
    dones = [each.done for each in seen]
    assert dones == sorted(dones)
    assert len(set(dones)) > 2
    assert all(each.seconds is not None and 0 <= each.seconds < 600 for each in seen)


def test_a_pass_that_fails_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    long_heads(monkeypatch)
    monkeypatch.setattr(head_tiles, "RowNormalizers", lambda *_: 1 / 0)
    with Answers(recording(attended(300, 300))) as answers, pytest.raises(ZeroDivisionError):
        answers.column(OfHead(0, 0), 0)


def test_a_pass_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    long_heads(monkeypatch)
    matrix = attended(300, 300)
    with Answers(recording(matrix)) as answers:
        with monkeypatch.context() as broken:
            broken.setattr(head_tiles, "RowNormalizers", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                answers.column(OfHead(0, 0), 0)
            with pytest.raises(ZeroDivisionError):
                answers.progress(OfHead(0, 0))
        torch.testing.assert_close(answers.column(OfHead(0, 0), 7), matrix[0, :, 7])
        assert answers.progress(OfHead(0, 0)).done == 1


def test_progress_is_told_while_a_column_waits_for_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_heads(monkeypatch)
    waits = threading.Event()

    def is_wanted() -> bool:
        waits.set()
        return True

    with Answers(recording(attended(3000, 3000))) as answers:
        column = threading.Thread(target=lambda: answers.column(OfHead(0, 0), 0, wanted=is_wanted))
        column.start()
        assert waits.wait(60)
        assert answers.progress(OfHead(0, 0)).done < 1
        column.join()


def test_closing_ends_a_pass_and_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    long_heads(monkeypatch)
    answers = Answers(recording(attended(3000, 3000)))
    threading.Timer(0.05, answers.close).start()
    with pytest.raises(Gone):
        answers.column(OfHead(0, 0), 0)
    assert "regard" not in {thread.name for thread in threading.enumerate()}


def test_memory_is_bounded_by_letting_go_of_what_was_looked_at_first() -> None:
    matrix = regard.attend(torch.randn(5, 300, 8), torch.randn(5, 300, 8))
    one = head_tiles.HeadTiles(matrix[0]).nbytes
    with Answers(recording(matrix), limit=2 * one) as answers:
        for head in range(5):
            answers.tile(OfHead(0, head), Place(1, 0, 0))
        assert answers.nbytes <= 2 * one
        exact = matrix[0].to_dense()[:256, :256]
        torch.testing.assert_close(answers.tile(OfHead(0, 0), Place(0, 0, 0)).values, exact)


# Steps, segments, heads


@parametrised([case for case in CASES if case.dtype == torch.float32 and case.sharp == 1])
def test_steps_are_those_of_the_library(case: Case) -> None:
    matrix = case.matrix(*case.inputs.of_scores)
    with Answers(recording(matrix)) as answers:
        query = matrix.shape[-2] // 2
        steps = answers.steps(OfHead(0, 0), query, "position", 0, 7)
    one = matrix[(0,) * (matrix.ndim - 2)]
    table = regard.steps(one, query, most=matrix.shape[-1]).table
    names = {"query·key": "dot"} | {
        name: name for name in ("scaled", "biased", "modified", "capped", "score", "weight")
    }
    for name, field in names.items():
        told = [step[field] for step in steps["rows"]]
        if name in table.names:
            assert_close(numbers(told), numbers(table[name][: len(told)]), 1e-5)
    assert [step["key"] for step in steps["rows"]] == list(range(len(steps["rows"])))
    assert steps["keys"] == matrix.shape[-1]
    assert steps["total"] == pytest.approx(float(one[query].sum()), abs=1e-5)


def numbers(cells: Sequence[float | None]) -> Tensor:
    return torch.tensor([-torch.inf if cell is None else cell for cell in cells])


@pytest.mark.parametrize("sinks", [None, torch.zeros(2)], ids=["without", "with sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sampled_map_of_few_queries_has_the_means_of_all_of_them(
    dtype: torch.dtype, sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 150, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Answers(recording(regard.attend(x, x, sink_bias=sinks))) as answers:
        exact = answers.overview(0)
        monkeypatch.setattr("regard.view.tiles.page_answers._MOST_CELLS", 10)
        sampled = answers.overview(0)
    assert sampled.pop("sampled") == 1
    assert (sampled["rows"], sampled["columns"]) == (exact["rows"], exact["columns"])
    assert sampled["maximum"] == pytest.approx(exact["maximum"], rel=torch.finfo(dtype).eps)
    shades = [torch.tensor([*b64decode(each["levels"])]) for each in (sampled, exact)]
    assert_close(*shades, within=1)


def test_the_strongest_keys_come_first_and_equal_ones_in_order() -> None:
    weights = torch.tensor([[[0.1, 0.4, 0.1, 0.4]]])
    with Answers(recording(regard.AttentionMatrix.from_weights(weights))) as answers:
        steps = answers.steps(OfHead(0, 0), 0, "weight", 1, 2)
    assert [step["key"] for step in steps["rows"]] == [3, 0]
    assert (steps["vector"], steps["maximum"], steps["rows"][0]["score"]) == (None, None, None)


def test_steps_count_what_is_set_aside_as_masked() -> None:
    with Answers(recording(attended(9, 9, mask=regard.Causal()))) as answers:
        steps = answers.steps(OfHead(0, 0, hidden=True), 4, "position", 0, 9)
    assert [step["allowed"] for step in steps["rows"]] == [False, *[True] * 4, *[False] * 4]
    assert (steps["masked"], steps["allowed"], steps["rows"][0]["score"]) == (True, 4, None)
    assert steps["total"] == pytest.approx(1)


def tokens(count: int) -> list[regard.Token]:
    return [regard.Token(f" {place}", special=place in (0, 5)) for place in range(count)]


@pytest.mark.parametrize("hidden", [False, True], ids=["all", "hidden"])
def test_segments_are_those_of_the_recording(hidden: bool, way: str) -> None:
    matrices = {name: regard.attend(*torch.randn(2, 1, 3, 12, 4)) for name in "ab"}
    seen = regard.Recording(matrices, query_tokens=tokens(12))
    queries, keys = [(0, 4), (4, 12)], [(0, 3), (3, 6), (6, 12)]
    with Answers(seen) as answers:
        shares = answers.segments(OfHead(1, 2, hidden), queries, keys)
    named = ({str(span): span for span in spans} for spans in (keys, queries))
    expected = regard.segment_shares(seen, next(named), queries=next(named), sinks=not hidden)
    torch.testing.assert_close(shares, expected.weights[1, 2])


def parts(tokens: int, edges: Sequence[float]) -> list[tuple[int, int]]:
    """Parts between these shares of a text, every third left out."""
    places = sorted({round(edge * tokens) for edge in edges})
    return [span for place, span in enumerate(pairwise(places)) if place % 3 != 2]


def test_a_query_that_looks_at_sinks_alone_has_no_segments_without_them() -> None:
    x, lowest = torch.zeros(1, 4, 2), torch.finfo(torch.float32).min
    seen = recording(regard.attend(x, x, bias=torch.full((4, 4), lowest).triu(1)))
    exact = regard.segment_shares(seen, {"rest": (1, 4), "start": (0, 1)}, sinks=False).total()
    with Answers(seen) as answers:
        parts = [(1, 4), (0, 1)]
        shares = answers.segments(OfHead(0, 0, hidden=True), parts, parts)
    torch.testing.assert_close(shares, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [False, True], ids=["all", "hidden"])
def test_segments_of_a_long_head_are_sums_of_weights(
    kind: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_heads(monkeypatch)
    matrix = KINDS[kind]()
    q_len, kv_len = matrix.shape[-2:]
    queries, keys = parts(q_len, (0, 0.11, 0.5, 0.6, 1)), parts(kv_len, (0.02, 0.3, 0.33, 0.9, 1))
    with Answers(recording(matrix)) as answers:
        shares = answers.segments(OfHead(0, 0, hidden), queries, keys)
    double = matrix.to(torch.float64)
    weights = double.to_dense()[0]
    if hidden:
        weights = oracle.softmax(double.scores.to_dense()[0], torch.arange(kv_len) > 0).weights
    some = (weights > 0).any(-1) if hidden else torch.ones(q_len, dtype=torch.bool)
    expected = [
        [weights[a:b, c:d].sum() / max(1, int(some[a:b].sum())) for c, d in keys]
        for a, b in queries
    ]
    torch.testing.assert_close(shares, torch.tensor(expected).float(), rtol=1e-5, atol=1e-7)


def test_hidden_sinks_are_the_first_key_and_special_tokens() -> None:
    seen = recording(attended(12, 12), query_tokens=tokens(12))
    with Answers(seen) as answers:
        mask = answers.row(OfHead(0, 0, hidden=True), 3).mask
    assert mask.tolist() == [place not in (0, 5) for place in range(12)]


def test_heads_are_those_of_the_library() -> None:
    seen = recording(attended(12, 12), query_tokens=tokens(12))
    with Answers(seen) as answers:
        assert [head["kind"] for head in answers.heads()["heads"]] == list(
            regard.heads(seen)["kind"]
        )


def test_a_layer_that_is_not_numbers_leaves_the_others_their_kinds() -> None:
    wrong = regard.AttentionMatrix.from_weights(torch.full((1, 2, 12, 12), torch.nan))
    seen = regard.Recording({"wrong": wrong, "right": attended(12, 12)})
    with Answers(seen) as answers:
        kinds = [head and head["kind"] for head in answers.heads()["heads"]]
    right = regard.heads(regard.Recording({"right": seen[1]}))["kind"]
    assert kinds == [None, None, *right]


def test_the_kinds_of_heads_wait_for_a_pass_and_a_pass_for_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question is begun before the quicker ones, and ends after them."""
    long_heads(monkeypatch)
    ended: list[str] = []
    row, finish = head_tiles.HeadTiles.row, head_tiles.HeadTiles.finish
    begun = {name: threading.Event() for name in ("heads", "column", "row")}

    def begin(name: str, before: str, run: Callable[[], Any]) -> Any:
        begun[name].set()
        assert begun[before].wait(60)
        return run()

    monkeypatch.setattr(
        head_tiles.HeadTiles,
        "finish",
        lambda self, pause: begin("column", "row", lambda: finish(self, pause)),
    )
    monkeypatch.setattr(
        head_tiles.HeadTiles,
        "row",
        lambda self, *more: begin("row", "column", lambda: (time.sleep(0.3), row(self, *more))[1]),
    )
    with Answers(recording(attended(600, 600))) as answers:

        def ask(name: str, *question: Any) -> None:
            getattr(answers, name)(*question)
            ended.append(name)

        asked = [
            threading.Thread(target=ask, args=(name, *question))
            for name, *question in (("column", OfHead(0, 0), 0), ("row", OfHead(0, 0), 3))
        ]
        for thread in asked:
            thread.start()
        assert begun["row"].wait(60)
        ask("heads")
        for thread in asked:
            thread.join()
    assert ended == ["row", "column", "heads"]


# What cannot be answered


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        pytest.param(
            lambda it: it.row(OfHead(1, 0), 0), "layer is 1; it must be from 0 to 0.", id="layer"
        ),
        pytest.param(
            lambda it: it.row(OfHead(0, 2), 0), "head is 2; it must be from 0 to 1.", id="head"
        ),
        pytest.param(
            lambda it: it.row(OfHead(0, -1), 0), "head is -1; it must be from 0 to 1.", id="-1"
        ),
        pytest.param(
            lambda it: it.row(OfHead(0, 0), 300),
            "query is 300; it must be from 0 to 299.",
            id="query",
        ),
        pytest.param(
            lambda it: it.column(OfHead(0, 0), 400),
            "key is 400; it must be from 0 to 399.",
            id="key",
        ),
        pytest.param(
            lambda it: it.tile(OfHead(0, 0), Place(2, 0, 0)),
            "level is 2; it must be from 0 to 1.",
            id="level",
        ),
        pytest.param(
            lambda it: it.tile(OfHead(0, 0), Place(0, 2, 0)),
            "row is 2; it must be from 0 to 1.",
            id="row",
        ),
        pytest.param(
            lambda it: it.tile(OfHead(0, 0), Place(1, 0, 1)),
            "column is 1; it must be from 0 to 0.",
            id="column",
        ),
        pytest.param(
            lambda it: it.steps(OfHead(0, 0), 300, "weight", 0, 1),
            "query is 300; it must be from 0 to 299.",
            id="steps",
        ),
        pytest.param(
            lambda it: it.segments(OfHead(0, 5), [(0, 1)], [(0, 1)]),
            "head is 5; it must be from 0 to 1.",
            id="segments",
        ),
    ],
)
def test_a_wrong_question_is_told_in_a_sentence(
    ask: Callable[[Answers], object], message: str
) -> None:
    matrix = regard.attend(torch.zeros(2, 300, 4), torch.zeros(2, 400, 4))
    with Answers(recording(matrix)) as answers, pytest.raises(WrongQuestionError) as error:
        ask(answers)
    assert str(error.value) == message
