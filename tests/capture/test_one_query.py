"""Attention of a single query: that of an additive score, and of a learned vector."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard

WIDTH = 12


class Additive(nn.Module):
    """Bahdanau's scores of all pairs, with one query as with several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        pairs = self.query(query)[:, :, None] + self.key(memory)[:, None]
        self.weights = self.score(pairs.tanh()).squeeze(-1).softmax(-1)
        return self.weights @ memory


@pytest.mark.parametrize("queries", [1, 2])
def test_additive_attention_is_recorded_with_any_number_of_queries(queries: int) -> None:
    with torch.no_grad(), regard.observe(model := Additive()) as seen:
        model(torch.randn(2, queries, WIDTH), torch.randn(2, 7, WIDTH))
    torch.testing.assert_close(seen[0].to_dense(), model.weights)


def test_one_masked_head_of_one_feature_is_no_additive_attention() -> None:
    class OneHead(nn.Module):
        def forward(self, x: Tensor, value: Tensor) -> Tensor:
            padding = torch.tensor([0.0, 0, 0, 0, -torch.inf])[None, None, None]
            self.weights = (x @ x.mT + padding).softmax(-1)
            return self.weights @ value

    with torch.no_grad(), regard.observe(model := OneHead()) as seen:
        model(torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 1))
    torch.testing.assert_close(seen[0].to_dense(), model.weights)


class Pooled(nn.Module):
    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.learned, self.join = nn.Parameter(torch.randn(WIDTH)), join

    def forward(self, x: Tensor) -> Tensor:
        self.weights = (x @ self.learned).softmax(-1)
        return self.join(self.weights, x)


@pytest.mark.parametrize(
    "join",
    [
        pytest.param(lambda weights, x: weights[:, None] @ x, id="product"),
        pytest.param(lambda weights, x: (weights[..., None] * x).sum(1), id="sum"),
        pytest.param(
            lambda weights, x: (x * weights[..., None]).sum(1, keepdim=True), id="keepdim"
        ),
    ],
)
def test_a_learned_query_is_recorded(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    with torch.no_grad(), regard.observe(model := Pooled(join)) as seen:
        model(torch.randn(2, 5, WIDTH))
    torch.testing.assert_close(seen[0].to_dense()[:, 0], model.weights)


def test_a_learned_query_whose_weights_are_not_summed_is_refused() -> None:
    model = nn.Sequential(
        regard.nn.SelfAttention(WIDTH),
        Pooled(lambda weights, x: (weights[..., None] * x).cumsum(1)),
    )
    refused = pytest.warns(regard.RefusedWarning, match="met no value")
    with torch.no_grad(), refused, regard.observe(model) as seen:
        model(torch.randn(2, 5, WIDTH))
    assert list(seen) == ["0"]
