"""Sums over many rows, and over many spans: how exact they are, and what they hold."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard
from regard.backends import sweep as blocks

FLOAT32 = torch.finfo(torch.float32).eps


def test_spans_outside_the_keys_of_a_window_sum_to_zero() -> None:
    query, key = torch.zeros(8, 1), torch.zeros(40, 1)
    A = regard.attend(query, key, mask=regard.SlidingWindow(3, 0))  # keys 29 to 39
    found = A.reduce(regard.Segments([(0, 8)], [(36, 40), (0, 28), (28, 36)]))
    assert torch.equal(found[:, 1], torch.zeros(1))
    torch.testing.assert_close(found.sum(-1), torch.ones(1))
    torch.testing.assert_close(A.pool(1, 10)[0, 0], torch.tensor(0.0))


# Many rows.

ASKED: dict[str, Callable[[int, int], regard.Reduction]] = {
    "sum": lambda *_: regard.Sum(-2),
    "pool": lambda *_: regard.Pool(1, 1),
    "uneven-pool": lambda *_: regard.Pool(1, 2),
    "segments": lambda q_len, kv_len: regard.Segments([(0, q_len)], [(0, kv_len), (0, 2)]),
}
SUMS: dict[str, Callable[[oracle.Dense], Tensor]] = {
    "sum": lambda dense: dense.weights.sum(-2),
    "pool": lambda dense: oracle.pool(dense, 1, 1),
    "uneven-pool": lambda dense: oracle.pool(dense, 1, 2),
    "segments": lambda dense: oracle.segments(
        dense, [(0, dense.weights.shape[0])], [(0, dense.weights.shape[1]), (0, 2)]
    ),
}


@cache
def inputs(q_len: int, kv_len: int, even: bool) -> tuple[Tensor, Tensor]:
    """Query and key whose weights are all alike, or all different."""
    generator = torch.Generator().manual_seed(q_len)
    size = 0 if even else 1
    query, key = (size * torch.rand(n, 2, generator=generator) for n in (q_len, kv_len))
    return query, key


@pytest.mark.parametrize("rows_of_a_block", [None, 29], ids=["usual-blocks", "small-blocks"])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("size", [(8192, 97), (30_011, 3)], ids=str)
def test_a_sum_over_many_rows_does_not_drift(
    size: tuple[int, int],
    name: str,
    even: bool,
    rows_of_a_block: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if rows_of_a_block is not None:
        monkeypatch.setattr(blocks, "BLOCK_SIZE", rows_of_a_block * size[1])
        monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    query, key = inputs(*size, even)
    found = regard.attend(query, key).reduce(ASKED[name](*size))
    assert found.dtype == torch.float32
    exact = SUMS[name](oracle.attend(query.double(), key.double()))
    # A rounding of the answer, and one of each weight, which may be the same for all.
    oracle.assert_close(found, exact, 2 * FLOAT32 * float(exact.max()))


def test_a_reduction_of_few_rows_leaves_the_others_to_the_next_one() -> None:
    query, key = inputs(97, 31, even=False)
    few, all_rows = regard.Segments([(40, 44)], [(0, 15)]), regard.Sum(-2)
    weights = oracle.attend(query.double(), key.double()).weights
    exact = {few: weights[40:44, :15].sum(-1).mean().reshape(1, 1), all_rows: weights.sum(-2)}
    for asked in ((few, all_rows), (all_rows, few)):
        answers = regard.attend(query, key).reduce(*asked, backend="sweep")
        for reduction, answer in zip(asked, answers, strict=True):
            oracle.assert_close(answer, exact[reduction], 1e-5)


# Many spans.


def spans_in(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Spans in any order that may overlap, repeat, and leave tokens out."""
    edges = st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True)
    return st.lists(edges.map(lambda pair: (min(pair), max(pair))), min_size=1, max_size=9)


@given(st.data())
def test_any_spans_have_the_sums_of_the_dense_matrix(data: st.DataObject) -> None:
    q_len, kv_len = (data.draw(st.integers(1, 37), label=name) for name in ("q_len", "kv_len"))
    queries, keys = data.draw(spans_in(q_len)), data.draw(spans_in(kv_len))
    keys *= data.draw(st.sampled_from([1, 40]), label="times")  # many spans are summed otherwise
    generator = torch.Generator().manual_seed(q_len)
    size = {"generator": generator, "dtype": torch.float64}
    query, key = torch.randn(2, q_len, 3, **size), torch.randn(2, kv_len, 3, **size)
    leaves = query.requires_grad_(), key.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_SIZE", 5 * kv_len)
        patch.setattr(blocks, "MIN_ROWS", 2)
        found = regard.attend(query, key).segments(queries, keys)
        exact = oracle.segments(oracle.attend(query, key), queries, keys)
        oracle.assert_close(found, exact, 1e-14)
        arriving = torch.randn(found.shape, **size)
        pairs = [torch.autograd.grad(each, leaves, arriving) for each in (found, exact)]
    for actual, right in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-12)


def test_a_span_of_tiny_weights_keeps_its_digits_beside_large_ones() -> None:
    scores = torch.zeros(40, 40)
    scores[:, 7:29] = -60.0
    spans = [(0, 7), (7, 29), (29, 40), (5, 29)]
    found = regard.AttentionMatrix.from_scores(scores).segments([(0, 40)], spans)
    exact = oracle.segments(oracle.softmax(scores.double()), [(0, 40)], spans)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.full
def test_100_000_spans_over_100_000_keys_take_little_memory() -> None:
    length = 100_000
    query, key = torch.zeros(40, 2), torch.zeros(length, 2)
    tokens = [(i, i + 1) for i in range(length)]
    by_token = regard.attend(query, key).segments([(0, 20), (10, 40)], tokens)
    torch.testing.assert_close(by_token, torch.full((2, length), 1 / length))
    until = [(0, i + 1) for i in range(length)]  # they overlap as much as spans can
    until_token = regard.attend(query, key).segments([(0, 40)], until)
    torch.testing.assert_close(until_token[0], torch.arange(1, length + 1) / length)
    of_tokens = regard.attend(key, query).segments(tokens, [(0, 40), (0, 10)])
    torch.testing.assert_close(of_tokens, torch.tensor([1.0, 0.25]).expand(length, 2))
