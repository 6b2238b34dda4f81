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


class Grouped(nn.Module):
    """Four heads of queries that share two keys, or one, with a cache of keys and values."""

    def __init__(
        self,
        kv_heads: int,
        scores: Callable[[Tensor, Tensor], Tensor],
        mix: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.keys = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 3 * kv_heads)
        self.values = nn.Linear(WIDTH, 3 * kv_heads)
        self.scores, self.mix = scores, mix
        self.cache: tuple[Tensor, Tensor] | None = None
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 3))
        key, value = (each(x).unflatten(-1, (-1, 3)) for each in (self.keys, self.values))
        if self.cache is not None:
            key, value = (torch.cat(pair, 1) for pair in zip(self.cache, (key, value), strict=True))
        self.cache = key, value
        rows, columns = query.shape[1], key.shape[1]
        allowed = torch.ones(rows, columns).tril(columns - rows).bool()
        scores = self.scores(query, key).masked_fill(~allowed, -torch.inf)
        self.weights.append(scores.softmax(-1))
        return self.mix(self.weights[-1], value)


def groups(query: Tensor) -> Tensor:
    return query.unflatten(2, (2, 2)).permute(0, 2, 3, 1, 4)


GROUPED = {
    "one key": (
        1,
        lambda q, k: torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]),
        lambda w, v: torch.einsum("bhqk,bkd->bqhd", w, v[:, :, 0]),
    ),
    "two keys": (
        2,
        lambda q, k: torch.einsum("bqgrd,bkgd->bgrqk", q.unflatten(2, (2, 2)), k).flatten(1, 2),
        lambda w, v: torch.einsum("bgrqk,bkgd->bqgrd", w.unflatten(1, (2, 2)), v),
    ),
    "rows": (
        2,
        lambda q, k: (
            (groups(q).flatten(2, 3) @ k.transpose(1, 2).mT).unflatten(2, (2, -1)).flatten(1, 2)
        ),
        lambda w, v: w.unflatten(1, (2, 2)).flatten(2, 3) @ v.transpose(1, 2),
    ),
    "broadcast": (
        2,
        lambda q, k: (groups(q) @ k.transpose(1, 2)[:, :, None].mT).flatten(1, 2),
        lambda w, v: w.unflatten(1, (2, 2)) @ v.transpose(1, 2)[:, :, None],
    ),
    "projected value": (
        4,
        lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
        lambda w, v: torch.einsum(
            "bhqk,bkhe->bqhe", w, torch.einsum("bkhd,hde->bkhe", v, torch.ones(4, 3, 5))
        ),
    ),
}


@pytest.mark.parametrize("parts", [(5, 1, 1), (1, 1, 1), (4, 3)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("way", GROUPED)
def test_heads_stay_heads_where_one_query_is_read(
    way: str, batch: int, parts: tuple[int, ...]
) -> None:
    model, texts = Grouped(*GROUPED[way]), torch.randn(batch, sum(parts), WIDTH)
    with torch.no_grad(), regard.observe(model, keep="qkv") as seen:
        for part in texts.split(parts, 1):
            model(part)
    rows = [nn.functional.pad(each, (0, sum(parts) - each.shape[-1])) for each in model.weights]
    assert list(seen) == ["Grouped"]
    torch.testing.assert_close(seen[0].to_dense(), torch.cat(rows, 2))


@pytest.mark.parametrize("keys", [1, 2])
def test_heads_of_one_feature_or_over_one_key_are_no_queries(keys: int) -> None:
    class Model(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            how = GROUPED["rows" if keys == 1 else "one key"]
            self.weights = how[1](query, key).softmax(-1)
            return how[2](self.weights, key)

    model, features = Model(), 3 if keys == 1 else 1
    with torch.no_grad(), regard.observe(model) as seen:
        model(torch.randn(2, 5, 4, features), torch.randn(2, keys, 2, features)[:, :, : 3 - keys])
    assert seen[0].shape == model.weights.shape
    torch.testing.assert_close(seen[0].to_dense(), model.weights)


def test_heads_that_transformers_packs_for_a_fallback_are_no_queries() -> None:
    """Keys and values of other sizes make PyTorch compute sdpa in steps."""
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}
    torch.manual_seed(0)
    model = StableLmForCausalLM(StableLmConfig(**sizes, **heads, attn_implementation="sdpa")).eval()
    text = torch.randint(0, 20, (2, 6))
    with torch.no_grad(), regard.observe(model, keep="qkv") as seen:
        text = model.generate(text, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad(), regard.observe(model) as once:
        model(text[:, :-1])
    assert list(seen) == list(once)
    torch.testing.assert_close(seen[0].to_dense(), once[0].to_dense())
