"""Rows, columns, products, sums and pictures of a matrix describe one and the same matrix.

The scores here are exact in float32: whole numbers times a power of two, or numbers that are given.
All that an answer may differ by from the float64 softmax of those scores is then its own rounding,
however large the scores are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard

LOWEST = torch.finfo(torch.float32).min
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Exact:
    """A matrix, and its scores as float32 has them."""

    matrix: regard.AttentionMatrix
    scores: Tensor
    allowed: Tensor | None = None
    sink: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> oracle.Dense:
        return oracle.softmax(self.scores.to(dtype), self.allowed, self.sink)


# How matrices are made.


def whole_numbers(*shape: int, most: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def close_scores(q_len: int, kv_len: int, size: float, seed: int) -> Tensor:
    """Scores of about one size, a few steps of at least 1 and of a last bit apart."""
    start = torch.tensor(size)
    step = max(1.0, float(start.nextafter(torch.tensor(torch.inf)) - start))
    return start - step * whole_numbers(q_len, kv_len, most=6, seed=seed).abs()


def by_scores(q_len: int, kv_len: int, size: float = 1.0, seed: int = 0) -> Exact:
    scores = close_scores(q_len, kv_len, size, seed)
    return Exact(regard.AttentionMatrix.from_scores(scores), scores)


def by_products(
    q_len: int,
    kv_len: int,
    size: float = 1.0,
    seed: int = 0,
    mask: str = "none",
    added: str = "none",
    sink: float | None = None,
) -> Exact:
    """Scores of query, key and bias; the query is a power of two longer for large scores."""
    query = whole_numbers(2, q_len, 3, most=2, seed=seed) * size
    key = whole_numbers(1, kv_len, 3, most=2, seed=seed + 1)
    bias = ADDED[added](q_len, kv_len)
    sinks = None if sink is None else torch.tensor([sink, -sink])
    matrix = regard.attend(query, key, mask=MASKS[mask][0], scale=1.0, bias=bias, sink_bias=sinks)
    scores = query @ key.mT if bias is None else query @ key.mT + bias
    sinks = None if sinks is None else sinks[:, None, None]
    return Exact(matrix, scores, MASKS[mask][1](q_len, kv_len), sinks)


MASKS: dict[str, tuple[regard.Mask | None, Callable[[int, int], Tensor | None]]] = {
    "none": (None, lambda *_: None),
    "causal": (regard.Causal(), oracle.causal),
    "window": (regard.SlidingWindow(5, 1), lambda *n: oracle.window(*n, 5, 1)),
}


def left_padding(low: float) -> Callable[[int, int], Tensor]:
    """What models add for causal attention to a text padded on the left."""

    def bias(q_len: int, kv_len: int) -> Tensor:
        seen = oracle.causal(q_len, kv_len) & (torch.arange(kv_len) >= kv_len // 3)
        return torch.where(seen, 0.0, low)

    return bias


ADDED: dict[str, Callable[[int, int], Tensor | None]] = {
    "none": lambda *_: None,
    "all-minus-1e9": lambda *n: torch.full(n, -1e9),
    "all-lowest": lambda *n: torch.full(n, LOWEST),
    "left-padding-1e9": left_padding(-1e9),
    "left-padding-lowest": left_padding(LOWEST),
}


# What is asked: of the matrix, and of its dense weights.


@dataclass(frozen=True)
class View:
    """A way to see a matrix, and the same of dense weights; `sums` of many weights or not."""

    asked: Callable[[regard.AttentionMatrix], Tensor]
    exact: Callable[[oracle.Dense], Tensor]
    sums: bool = False


def some(length: int) -> list[int]:
    return sorted({0, length // 2, length - 1})


def spans(length: int) -> list[tuple[int, int]]:
    return [(0, length), (length // 2, length // 2 + 1), (length // 3, length)]


def operand(length: int) -> Tensor:
    return torch.randn(length, 2, generator=torch.Generator().manual_seed(length))


def of_dense(part: Callable[[Tensor], Tensor]) -> View:
    """A part that is written in the same words of a matrix and of a tensor."""
    return View(part, lambda dense: part(dense.weights))


def at_top_keys(A: regard.AttentionMatrix) -> Tensor:
    """The weights of the largest keys, each read as a window of one number would be."""
    top = A.topk(min(3, A.shape[-1]))
    weights = A.to_dense().gather(-1, top.indices.clamp(min=0))
    return torch.stack([top.values, weights.masked_fill(top.indices == -1, 0)])


VIEWS: dict[str, View] = {
    "rows": of_dense(lambda m: torch.stack([m[..., i, :] for i in some(m.shape[-2])])),
    "columns": of_dense(lambda m: torch.stack([m[..., j] for j in some(m.shape[-1])])),
    "window": of_dense(lambda m: m[..., m.shape[-2] // 3 :, : m.shape[-1] // 2 + 1]),
    "tall-window": of_dense(lambda m: m[..., m.shape[-1] // 2 : m.shape[-1] // 2 + 2]),
    "steps": of_dense(lambda m: m[..., ::3, 1::5]),
    "product": View(
        lambda A: A @ operand(A.shape[-1]),
        lambda d: d.weights @ operand(d.weights.shape[-1]).to(d.weights.dtype),
        sums=True,
    ),
    "transposed-product": View(
        lambda A: A.T @ operand(A.shape[-2]),
        lambda d: d.weights.mT @ operand(d.weights.shape[-2]).to(d.weights.dtype),
        sums=True,
    ),
    "from-the-left": View(
        lambda A: operand(A.shape[-2]).mT @ A,
        lambda d: operand(d.weights.shape[-2]).mT.to(d.weights.dtype) @ d.weights,
        sums=True,
    ),
    "sum-keys": View(lambda A: A.sum(-1), lambda d: d.weights.sum(-1), sums=True),
    "sum-queries": View(lambda A: A.sum(-2), lambda d: d.weights.sum(-2), sums=True),
    "pool": View(lambda A: A.pool(3, 4), lambda d: oracle.pool(d, 3, 4), sums=True),
    "segments": View(
        lambda A: A.segments(spans(A.shape[-2]), spans(A.shape[-1])),
        lambda d: oracle.segments(d, spans(d.weights.shape[-2]), spans(d.weights.shape[-1])),
        sums=True,
    ),
    "diagonal": View(lambda A: A.diagonal(), lambda d: oracle.diagonal(d, 0)),
    "max-score": View(lambda A: A.scores.amax(-1), oracle.max_score),
    "entropy": View(lambda A: A.entropy(), oracle.entropy, sums=True),
    "top-k": View(
        at_top_keys,
        lambda d: oracle.topk(d, min(3, d.weights.shape[-1])).values.expand(
            2, *d.weights.shape[:-1], -1
        ),
    ),
}


def compared(given: Exact) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each view of a matrix by name, with the comparison to its dense definition."""
    dense, plain = given.dense(torch.float64), given.dense(torch.float32)
    for name, view in VIEWS.items():
        exact = view.exact(dense)
        within = oracle.allowed_error(
            exact,
            view.exact(plain),
            dtype=torch.float32,
            scores=0.0,  # which are exact
            roundings=oracle.SUM_ROUNDINGS if view.sums else 2,
        )
        yield (
            name,
            lambda view=view, exact=exact, within=within: oracle.assert_close(
                view.asked(given.matrix), exact, within
            ),
        )


SIZES = [1.0, 1e3, 4e4, 2.0**20, 1e7, 1e9, 1e18, 1e30, 1e38]


@pytest.mark.parametrize("size", SIZES, ids="{:.0e}".format)
def test_given_scores_of_any_size_are_one_matrix(size: float, subtests: pytest.Subtests) -> None:
    for name, compare in compared(by_scores(37, 41, size)):
        with subtests.test(name):
            compare()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("power", [0, 8, 20, 60, 120], ids="2^{}".format)
@pytest.mark.parametrize("mask", MASKS)
def test_products_of_any_size_are_one_matrix(
    mask: str, power: int, subtests: pytest.Subtests
) -> None:
    for name, compare in compared(by_products(29, 31, 2.0**power, mask=mask)):
        with subtests.test(name):
            compare()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("added", [name for name in ADDED if name != "none"])
def test_a_matrix_with_an_additive_mask_is_one_matrix(
    added: str, mask: str, subtests: pytest.Subtests
) -> None:
    for name, compare in compared(by_products(29, 31, mask=mask, added=added)):
        with subtests.test(name):
            compare()


@pytest.mark.parametrize("size", [1.0, 2.0**21], ids=str)
def test_a_matrix_with_sinks_is_one_matrix(size: float, subtests: pytest.Subtests) -> None:
    for name, compare in compared(by_products(29, 31, size, sink=3 * size)):
        with subtests.test(name):
            compare()


LENGTHS = [
    *[(rows, 97) for rows in (1, 2, 31, 32, 33, 127, 128, 129, 1000, 4096)],
    (97, 4097),
    (1, 4096),
    (257, 1),
    pytest.param(4096, 4096, marks=pytest.mark.full),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_a_matrix_of_any_length_is_one_matrix(
    q_len: int, kv_len: int, subtests: pytest.Subtests
) -> None:
    for name, compare in compared(by_scores(q_len, kv_len, 4e4)):
        with subtests.test(name):
            compare()


@st.composite
def matrices(draw: st.DrawFn) -> tuple[str, Exact]:
    q_len, kv_len, seed = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(0))
    if draw(st.booleans()):
        size = draw(st.floats(1, 1e38)) * draw(st.sampled_from([1, -1]))
        size = float(torch.tensor(size))
        text = f"by_scores({q_len}, {kv_len}, {size!r}, {seed % 2**31})"
        return text, by_scores(q_len, kv_len, size, seed % 2**31)
    size = 2.0 ** draw(st.integers(-9, 120))
    mask, added = draw(st.sampled_from(sorted(MASKS))), draw(st.sampled_from(sorted(ADDED)))
    text = f"by_products({q_len}, {kv_len}, {size!r}, {seed % 2**31}, {mask=}, {added=})"
    return text, by_products(q_len, kv_len, size, seed % 2**31, mask, added)


@given(drawn=matrices())
def test_any_matrix_is_one_matrix(drawn: tuple[str, Exact]) -> None:
    text, exact = drawn
    note(text)
    for name, compare in compared(exact):
        note(f"asked: {name}")
        compare()


# Too long for a dense matrix in float64.

MANY_ROWS, FEW_KEYS = 100_000, 97


def in_blocks(rows: int = 4096) -> Iterator[tuple[slice, Tensor]]:
    """The weights of the matrix of all rows, some of them at a time, in float64."""
    query, key = long_inputs()
    for start in range(0, MANY_ROWS, rows):
        block = slice(start, min(start + rows, MANY_ROWS))
        yield block, (query[block].double() @ key.double().mT).softmax(-1)


def long_inputs() -> tuple[Tensor, Tensor]:
    query = whole_numbers(MANY_ROWS, 3, most=3, seed=0)
    return query, whole_numbers(FEW_KEYS, 3, most=3, seed=1)


@pytest.mark.full
def test_a_hundred_thousand_rows_are_one_matrix(subtests: pytest.Subtests) -> None:
    query, key = long_inputs()
    A = regard.attend(query, key, scale=1.0)
    x, v = operand(MANY_ROWS), operand(FEW_KEYS)
    received = torch.zeros(FEW_KEYS, dtype=torch.float64)
    transposed = torch.zeros(FEW_KEYS, 2, dtype=torch.float64)
    columns, products, entropies = [], [], []
    for rows, weights in in_blocks():
        received += weights.sum(0)
        transposed += weights.mT @ x[rows].double()
        columns.append(weights[:, ::40])
        products.append(weights @ v.double())
        entropies.append(torch.special.entr(weights).sum(-1))
    relative = 1e-5  # what design.md promises of sums
    expected: dict[str, tuple[Tensor, Tensor, float]] = {
        "sum": (A.sum(-2), received, relative),
        "pool": (A.pool(1, FEW_KEYS)[0], received / MANY_ROWS, relative),
        "segments": (A.segments([(0, MANY_ROWS)], [(0, 50), (50, FEW_KEYS)]).flatten(),
                     torch.stack([received[:50].sum(), received[50:].sum()]) / MANY_ROWS, relative),
        "transposed-product": (A.T @ x, transposed, relative * float(received.max())),
        "columns": (A[:, ::40], torch.cat(columns), 4 * EPS),
        "product": (A @ v, torch.cat(products), relative),
        "entropy": (A.entropy(), torch.cat(entropies), relative),
    }  # fmt: skip
    for name, (found, exact, within) in expected.items():
        with subtests.test(name):
            oracle.assert_close(found, exact, within * max(1.0, oracle.largest(exact)))
