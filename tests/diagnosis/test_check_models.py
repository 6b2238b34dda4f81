"""Models with several attentions: each is judged, wherever it stands."""

import pytest
import torch
from torch import Tensor, nn

import regard

DIM, HEADS, TOKENS = 24, 3, 13


class Attention(nn.Module):
    """Right but for what it divides the scores by, and whether it looks ahead."""

    def __init__(self, scale: float = (DIM // HEADS) ** -0.5, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.scale, self.causal = scale, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * self.scale
        if self.causal:
            keep = torch.ones_like(scores, dtype=torch.bool).tril()
            scores = scores.masked_fill(~keep, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Unscaled(Attention):
    def __init__(self, *, causal: bool = False) -> None:
        super().__init__(1.0, causal=causal)


class Model(nn.Module):
    def __init__(self, *attentions: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(attentions)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in attentions)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class Language(nn.Module):
    """From the numbers of tokens to logits, as people train them."""

    def __init__(self, *attentions: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(31, DIM), nn.Embedding(TOKENS, DIM)
        self.model, self.head = Model(*attentions), nn.Linear(DIM, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.model(x))


class Stranger(nn.Module):
    """An attention that is right inside, and something else around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sigmoid().cumsum(1)) * x.tanh()


WRONG = [
    pytest.param(Model(Unscaled(), Attention()), "In layers.0. ", id="the first"),
    pytest.param(Model(Attention(), Unscaled()), "In layers.1. ", id="the last"),
    pytest.param(Language(Unscaled()), "", id="from tokens"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "where"), WRONG)
def test_a_mistake_is_told_in_whatever_layer_it_is(model: nn.Module, where: str) -> None:
    report = regard.check(model, expect=regard.spec())
    [finding] = report.faults
    assert finding.name == "no-scale"
    assert finding.detail == f"{where}scale: 1; expected: 1/√8 = 0.3536."
    assert finding.code == "scores = q @ k.mT * self.scale"


def test_a_model_of_right_attentions_is_right() -> None:
    report = regard.check(Language(Attention(), Attention(causal=True)))
    assert (report.verdict, report.findings) == ("right", ())
    assert report.read_as == "ids (batch, tokens)"


@pytest.mark.full
def test_two_of_one_class_that_are_set_up_otherwise_are_both_judged() -> None:
    report = regard.check(Model(Attention(), Attention(0.5)))
    assert report.verdict == "different"
    assert report.pin == "expect=regard.spec(causal=False, heads=3, scale=regard.ANY)"
    [finding] = report.findings
    assert (finding.name, finding.detail[:9]) == ("wrong-scale", "In layers")
    assert "layers.1" in finding.detail


@pytest.mark.full
def test_a_model_that_is_meant_to_be_causal_is_asked_as_a_whole() -> None:
    causal, other = (Language(Attention(causal=flag)) for flag in (True, False))
    assert regard.check(causal, causal=True).findings == ()
    assert [f.name for f in regard.check(other, causal=True).findings] == ["not-causal"]


def test_an_attention_in_something_unknown_is_what_it_computes() -> None:
    report = regard.check(Stranger())
    assert report.verdict == "right"
    assert report.computes is not None
    assert report.computes.formula == "softmax(q·kᵀ/√8)·v"


def test_a_model_without_softmax_is_no_verdict() -> None:
    report = regard.check(Language())
    assert report.verdict == "cannot tell"
    assert "no softmax of scores meets a value" in report.missing


def test_heads_side_by_side_are_one_attention() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(regard.nn.SelfAttention(DIM, 1) for _ in range(HEADS))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x) for head in self.heads]).amax(0)

    assert f"{HEADS} heads of" in str(regard.check(Heads()))


@pytest.mark.parametrize("seed", [15, 33])  # two neighbours of 2,048 are 0 for the first inputs
def test_numbers_that_a_relu_leaves_out_of_few_tokens_are_not_idle(seed: int) -> None:
    torch.manual_seed(seed)
    assert regard.check(nn.TransformerEncoderLayer(16, 2, batch_first=True)).ok


@pytest.mark.full
def test_a_layer_of_pytorch_has_no_line_of_its_caller() -> None:
    report = regard.check(nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True))
    assert report.ok
    assert "(line" not in str(report.computes)
