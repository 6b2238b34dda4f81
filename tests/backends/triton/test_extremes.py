"""Scores at the edges of float32: rows far below 0, infinities, scales of any size."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

# Kernels compute with infinities where nothing is stored; NumPy warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered")

Q_LEN, KV_LEN, HEAD_DIM = 18, 70, 5  # more than two tiles of keys
LOWEST = torch.finfo(torch.float32).min
ASKED: dict[str, regard.Reduction] = {
    "logsumexp": regard.LogSumExp(),
    "entropy": regard.Entropy(),
    "mass": regard.Sum(-1),
    "top-1": regard.TopK(1),
    "top": regard.TopK(3),
    "columns": regard.Sum(-2),
    "pool": regard.Pool(2, 3),
}
asked = pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    return torch.randn(Q_LEN, HEAD_DIM), torch.randn(KV_LEN, HEAD_DIM)


def lowered(by: float, dtype: torch.dtype = torch.float32) -> regard.AttentionMatrix:
    """A whole row is low, and the first tile of another; their scores have no other part."""
    query, key = given()
    query[1] = query[4] = 0
    bias = torch.zeros(Q_LEN, KV_LEN)
    bias[1] = by
    bias[4, :33] = by
    return regard.attend(query.to(dtype), key.to(dtype), bias=bias.to(dtype))


def infinite() -> regard.AttentionMatrix:
    query, key = given()
    bias = torch.zeros(Q_LEN, KV_LEN)
    bias[1, 40] = torch.inf
    return regard.attend(query, key, bias=bias)


def with_sinks() -> regard.AttentionMatrix:
    query, key = given()
    query[1] = query[4] = 0
    bias = torch.zeros(Q_LEN, KV_LEN)
    bias[1], bias[4, :33] = -1e9, LOWEST
    query, key = query.expand(4, *query.shape), key.expand(4, *key.shape)
    sinks = torch.tensor([0.5, -1e9, LOWEST, 40.0])
    return regard.attend(query, key, bias=bias, sink_bias=sinks)


def scaled(
    by: float, length: float = 1.0, mask: regard.Mask | None = None
) -> Callable[[], regard.AttentionMatrix]:
    """Query and key `length` times as long."""

    def matrix() -> regard.AttentionMatrix:
        query, key = given()
        return regard.attend(query * length, key * length, scale=by, mask=mask)

    return matrix


def large() -> regard.AttentionMatrix:
    """Scores in the thousands that are whole numbers."""
    query, key = given()
    return regard.attend((query * 9).round(), (key * 9).round(), scale=64.0)


MATRICES: dict[str, Callable[[], regard.AttentionMatrix]] = {
    **{f"lowered-by{by:g}": (lambda by=by: lowered(by)) for by in (-1e4, -1e9, -1e30, -1e38)},
    "lowered-to-lowest": lambda: lowered(LOWEST),
    "lowered-in-bfloat16": lambda: lowered(torch.finfo(torch.bfloat16).min, torch.bfloat16),
    "lowered-in-float16": lambda: lowered(torch.finfo(torch.float16).min, torch.float16),
    "lowered-beside-sinks": with_sinks,
    "score-of-infinity": infinite,
    "scale-of-nearly-0": scaled(1e-50, 0.0, mask=regard.Causal()),
    "scale-negative-of-nearly-0": scaled(-1e-50, 0.0, mask=regard.Causal()),
    "products-beyond-float32": scaled(1e-38, 1e19),
    "large-scores": large,
}


def parts(answer: Tensor | regard.Top) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


@pytest.mark.full
@asked
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_a_score_of_any_size_gives_what_float64_gives(
    matrix: Callable[[], regard.AttentionMatrix], asked: regard.Reduction, device: torch.device
) -> None:
    A = matrix().to(device)
    found, exact = (parts(A.reduce(asked, backend=name)) for name in ("triton", "dense"))
    for mine, definition in zip(found, exact, strict=True):
        torch.testing.assert_close(
            mine.double(), definition.double(), rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_a_query_of_nan_is_not_felt_by_keys_that_it_may_not_attend_to(
    device: torch.device,
) -> None:
    query, key = given()
    query[3] = torch.nan
    A = regard.attend(query, key, mask=regard.Causal(align="top-left")).to(device)
    spans = regard.Segments([(0, Q_LEN)], [(0, 4), (4, KV_LEN)])
    columns, segments = A.reduce(regard.Sum(-2), spans, backend="triton")
    assert columns.isnan().tolist() == [True] * 4 + [False] * (KV_LEN - 4)
    assert segments.isnan().tolist() == [[True, False]]


def test_a_row_at_the_lowest_number_leaves_all_to_its_sink(device: torch.device) -> None:
    query, key = given()
    bias = torch.full((KV_LEN,), LOWEST)
    A = regard.attend(query[None], key[None], bias=bias, sink_bias=torch.tensor([0.5])).to(device)
    lse, entropy, mass = A.reduce(
        *(ASKED[x] for x in ("logsumexp", "entropy", "mass")), backend="triton"
    )
    assert lse.unique().tolist() == [0.5]
    assert (entropy.unique().tolist(), mass.unique().tolist()) == ([0.0], [0.0])


@pytest.mark.parametrize("near", [100.0, 1e4, 1e6], ids=str)
def test_how_large_scores_are_costs_a_weight_nothing(near: float, device: torch.device) -> None:
    query, key = (tokens.round() for tokens in given())  # so that every pass has the same scores
    A = regard.attend(query, key, scale=0.25, bias=torch.full((KV_LEN,), near)).to(device)
    mass = A.reduce(regard.Sum(-2), backend="triton").sum()
    torch.testing.assert_close(float(mass), float(Q_LEN), rtol=3e-6, atol=0)
