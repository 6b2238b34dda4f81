"""The statistics of a recorded layer equal those of dense float64 weights."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oracle
import regard
from regard.training.row_numbers import LOCAL, STATISTICS, samples_of
from regard.training.summaries import Summary, summarize

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM = 3, 4, 2, 23, 8


class Attention(nn.Module):
    """Grouped attention of given queries and keys, so that the oracle knows both."""

    def __init__(self, mask: Tensor, *, by_hand: bool = False) -> None:
        super().__init__()
        self.mask, self.by_hand = mask, by_hand

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        if self.by_hand:
            key = key.repeat_interleave(HEADS // KV_HEADS, 1)
            scores = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(~self.mask, -torch.inf)
            return scores.softmax(-1).nan_to_num() @ key
        return F.scaled_dot_product_attention(query, key, key, self.mask, enable_gqa=True)


def expected(query: Tensor, key: Tensor, allowed: Tensor, real: Tensor) -> dict[str, list[Tensor]]:
    """The numbers of the rows of each head by statistic; ``real`` is (batch, tokens)."""
    query, key = query.double(), key.double()
    dense = oracle.attend(query, key, allowed=allowed)
    weights, first = dense.weights, real.int().argmax(-1)
    rows = torch.arange(TOKENS)
    entropy, keys = oracle.entropy(dense), allowed.expand(BATCH, 1, -1, -1).sum(-1)
    near = (rows[:, None] - rows).abs() <= LOCAL
    previous = torch.zeros(BATCH, HEADS, TOKENS, dtype=torch.float64)
    previous[..., 1:] = weights.diagonal(-1, dim1=-2, dim2=-1)
    repeated = oracle.repeated(key, HEADS)
    numbers = {
        "max_score": dense.scores.amax(-1),
        "logsumexp": dense.scores.logsumexp(-1),
        "entropy": entropy,
        "normalized_entropy": entropy / keys.clamp(min=2).log(),
        "first_token": weights[torch.arange(BATCH), :, :, first],
        "diagonal": weights.diagonal(dim1=-2, dim2=-1),
        "previous_token": previous,
        "local_window": (weights * near).sum(-1),
        "query_norm": query.norm(dim=-1),
        "key_norm": repeated.norm(dim=-1),
    }
    # A row after the first real token has a previous token.
    after = real & (rows > first[:, None])
    return {
        name: [of[:, head][after if name == "previous_token" else real] for head in range(HEADS)]
        for name, of in numbers.items()
    }


def observed(layer: Attention, query: Tensor, key: Tensor, rows: int | None = None) -> dict:
    queries = None if rows is None else slice(-rows, None)
    with regard.observe(layer, queries=queries) as seen:
        layer(query, key)
    samples = samples_of(seen.layers[0], STATISTICS)
    assert samples is not None
    summaries = summarize({"a": (range(HEADS), samples)})
    return {name: summary for (_, name), summary in summaries.items()}


def assert_summary(got: Summary, numbers: list[Tensor]) -> None:
    """Mean, extremes and quantiles of each head; a quantile is a number of the sample."""
    for head, of in enumerate(numbers):
        ordered, count = of.sort().values, len(of)
        wanted = {
            "mean": of.mean(),
            "min": ordered[0],
            "max": ordered[-1],
            **{f"p{n}": ordered[math.ceil(n / 100 * count) - 1] for n in (10, 50, 90)},
        }
        assert got.rows[head] == count
        for name, value in wanted.items():
            torch.testing.assert_close(
                getattr(got, name)[head], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m
            )


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
RIGHT = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9], [17]])
LEFT = RIGHT.flip(-1)
EVERYTHING = torch.ones(BATCH, TOKENS, dtype=torch.bool)


@pytest.mark.parametrize("by_hand", [False, True], ids=["fused", "by hand"])
@pytest.mark.parametrize("scale", [1.0, 5.0], ids=["ordinary", "scores of 100"])
@pytest.mark.parametrize(
    ("allowed", "real"),
    [
        pytest.param(CAUSAL[None, None], EVERYTHING, id="causal"),
        pytest.param(torch.ones(1, 1, TOKENS, TOKENS).bool(), EVERYTHING, id="everything"),
        pytest.param(CAUSAL & RIGHT[:, None, None], RIGHT, id="padding on the right"),
        pytest.param(CAUSAL & LEFT[:, None, None], LEFT, id="padding on the left"),
    ],
)
def test_statistics_equal_dense_float64(
    allowed: Tensor, real: Tensor, scale: float, by_hand: bool
) -> None:
    query = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM) * scale
    key = torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM) * scale
    found = observed(Attention(allowed, by_hand=by_hand), query, key)
    numbers = expected(query, key, allowed, real)
    assert list(found) == list(STATISTICS)
    for name, of in numbers.items():
        assert_summary(found[name], of)


def test_the_last_rows_are_exact_for_these_rows() -> None:
    query = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM)
    key = torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM)
    found = observed(Attention(CAUSAL), query, key, rows=5)
    last = EVERYTHING & (torch.arange(TOKENS) >= TOKENS - 5)
    of_all = expected(query, key, CAUSAL[None, None], EVERYTHING)
    for name, rows in of_all.items():
        chosen = [
            of if name == "key_norm" else of.unflatten(0, (BATCH, -1))[:, -5:].flatten()
            for of in rows
        ]
        assert_summary(found[name], chosen)
    assert int(last.sum()) == int(found["entropy"].rows[0])


def test_a_layer_without_a_batch_has_statistics() -> None:
    query, key = torch.randn(HEADS, TOKENS, HEAD_DIM), torch.randn(KV_HEADS, TOKENS, HEAD_DIM)
    layer = Attention(CAUSAL)
    alone = observed(layer, query, key)
    one = observed(layer, query[None], key[None])
    for name in STATISTICS:
        torch.testing.assert_close(alone[name][1:], one[name][1:], rtol=1e-5, atol=1e-5)


def test_attention_to_another_text_has_no_distances() -> None:
    query = torch.randn(BATCH, HEADS, 5, HEAD_DIM)
    found = observed(
        Attention(torch.ones(5, TOKENS).bool()), query, torch.randn(BATCH, KV_HEADS, TOKENS, 8)
    )
    assert set(STATISTICS) - set(found) == {"diagonal", "previous_token", "local_window"}


def test_recorded_weights_have_no_scores_and_no_norms() -> None:
    weights = torch.randn(BATCH, HEADS, TOKENS, TOKENS).softmax(-1)
    seen = regard.Recording({"a": regard.AttentionMatrix.from_weights(weights)})
    found = samples_of(seen.layers[0], STATISTICS)
    assert found is not None
    assert set(STATISTICS) - set(found.names) == {
        "max_score",
        "logsumexp",
        "query_norm",
        "key_norm",
    }


def test_one_row_of_nan_makes_all_numbers_of_its_head_nan() -> None:
    query = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM)
    query[0, 1, 3] = torch.nan
    found = observed(Attention(CAUSAL), query, torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM))
    for name in set(STATISTICS) - {"key_norm"}:
        numbers = torch.stack(found[name][1:-1])
        assert numbers.isnan().any(0).tolist() == [False, True, False, False], name
        assert numbers.isnan().all(0).tolist() == [False, True, False, False], name
