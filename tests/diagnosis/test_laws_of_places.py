"""Laws on where numbers come from and go to: rotations, rows, lengths, parts of parameters."""

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import check
from regard.diagnosis.report import Report


class Heads(nn.Module):
    """Right, causal; each test changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        b, t, _ = x.shape
        return self.qkv(x).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        output = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(output.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x))


def broken(report: Report) -> set[str]:
    return {result.law.name for result in report.laws if result.outcome == "broken"}


class Rotated(Heads):
    """Queries and keys behind a norm, which hides from the scores how they are turned."""

    def angles(self, tokens: int) -> Tensor:
        return torch.arange(tokens)[:, None] * 100.0 ** (-torch.arange(4) / 4)

    def turned(self, x: Tensor) -> Tensor:
        angles = self.angles(x.shape[-2])
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = (nn.functional.rms_norm(t, (8,)) for t in (q, k))
        return self.attend(self.turned(q), self.turned(k), v)


class RotatedInPairs(Rotated):
    """Angles of halves, numbers of pairs."""

    def turned(self, x: Tensor) -> Tensor:
        angles = self.angles(x.shape[-2]).repeat(1, 2)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * angles.cos() + other * angles.sin()


class RotatedByATable(Rotated):
    """The table has rows for more positions; ``sign`` = 1 turns a part of each pair back."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign
        angles = self.angles(32)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([one * cos + self.sign * other * sin, one * sin + other * cos], -1)


class RotatedByComplexNumbers(RotatedByATable):
    def __init__(self, sign: int) -> None:
        super().__init__(sign)
        del self.cos, self.sin
        angles = self.angles(32)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        turns = self.turns[: x.shape[-2]]
        turned = pairs * turns if self.sign < 0 else pairs + pairs.conj() * turns
        return torch.view_as_real(turned).flatten(-2)


class RotatedByArguments(Rotated):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = (nn.functional.rms_norm(t, (8,)) for t in (q, k))

        def turned(t: Tensor, sign: int) -> Tensor:
            one, other = t.chunk(2, -1)
            return torch.cat([one * cos - other * sin, sign * one * sin + other * cos], -1)

        return self.attend(turned(q, 1), turned(k, self.sign), v)

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign


@pytest.mark.parametrize(
    "layer", [Rotated(), RotatedByATable(-1), RotatedByComplexNumbers(-1)], ids=type
)
def test_rotations_by_distance_are_right(layer: nn.Module) -> None:
    report = check(layer, causal=True)
    assert report.verdict == "right", report
    assert "rotary positions of " in str(report)


@pytest.mark.parametrize(
    "layer",
    [RotatedInPairs(), RotatedByATable(1), RotatedByComplexNumbers(1)],
    ids=type,
)
def test_rotations_that_follow_positions_are_not_right(layer: nn.Module) -> None:
    report = check(layer, causal=True)
    assert (report.verdict, report.findings) == ("cannot tell", ()), report


@pytest.mark.parametrize(("sign", "verdict"), [(1, "right"), (-1, "cannot tell")])
def test_tables_of_rotations_may_be_arguments(sign: int, verdict: str) -> None:
    angles = Rotated().angles(6)
    args = (torch.randn(2, 6, 16), angles.cos(), angles.sin())
    report = check(RotatedByArguments(sign), args=args, causal=True)
    assert report.verdict == verdict, report


class SharesOneValueHead(Heads):
    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().split(x)
        return q, k, v[:, :1].expand_as(v)


class BiasByDistance(Heads):
    """A learned bias; with ``heads`` = 1 that of the first head is given to both."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.bias = nn.Embedding(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        place = torch.arange(x.shape[1])
        distance = (place - place[:, None]).clamp(-4, 4) + 4
        bias = self.bias(distance).permute(2, 0, 1)[: self.heads]
        scores = q @ k.mT / 8**0.5 + bias
        output = scores.softmax(-1) @ v
        return self.out(output.transpose(1, 2).flatten(2))


def test_a_part_of_a_parameter_without_influence_is_wrong() -> None:
    report = check(SharesOneValueHead(), causal=True)
    assert report.faults[0].detail.startswith("Numbers 40 to 47 of 48 along axis 0 of qkv.weight")
    assert check(BiasByDistance(2), causal=False).verdict == "right"
    report = check(BiasByDistance(1), causal=False)
    assert report.faults[0].detail.startswith("Number 1 of 2 along axis 1 of bias.weight")


class BiasOfKeys(nn.Module):
    """A bias of the keys with an axis for the heads; it moves no weight."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.register_parameter(f"w_{name}", nn.Parameter(torch.randn(2, 16, 8) / 4))
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(2, 8)))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btm,hmd->bhtd", x, self.w_q) + self.b_q[:, None]
        k = torch.einsum("btm,hmd->bhtd", x, self.w_k) + self.b_k[:, None]
        v = torch.einsum("btm,hmd->bhtd", x, self.w_v) + self.b_v[:, None]
        output = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.out(output.transpose(1, 2).flatten(2))


def test_a_bias_of_keys_by_head_is_right() -> None:
    assert check(BiasOfKeys(), causal=False).verdict == "right"


class AtTheStartOfTraining(Heads):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_layer_of_zeros_hides_nothing() -> None:
    layer = AtTheStartOfTraining()
    assert check(layer, causal=True).verdict == "right"
    assert not layer.out.weight.any()


class ExchangesOutputs(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        output = nn.functional.scaled_dot_product_attention(q, k, v)
        rows = self.out(output.transpose(1, 2).flatten(2))
        return torch.cat([rows[:, :1], rows[:, 1:-1].flip(1), rows[:, -1:]], 1)


def test_outputs_in_another_order_than_the_tokens_are_wrong() -> None:
    report = check(ExchangesOutputs(), causal=False)
    assert [finding.name for finding in report.faults] == ["output"], report


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 3) -> Tensor:
    """Causal: each token attends to itself and the `window - 1` tokens before it."""
    i = torch.arange(q.shape[-2])
    apart = i[:, None] - i
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill((apart < 0) | (apart > window), -torch.inf)
    return scores.softmax(-1) @ v


def test_a_window_of_another_size_than_is_expected_is_wrong() -> None:
    report = check(local_attention, expect=regard.spec(causal=True, window=3))
    [finding] = report.faults
    assert str(finding).splitlines()[1].strip() == (
        "window: causal, a window of 4 keys; expected: a window of 3."
    )


class ScalesPositionsByTheLength(Rotated):
    def angles(self, tokens: int) -> Tensor:
        return super().angles(tokens) / tokens


def test_what_depends_on_the_number_of_tokens_is_no_verdict() -> None:
    report = check(ScalesPositionsByTheLength(), causal=True)
    assert report.verdict == "cannot tell", report
    assert "7 tokens are projected in another way" in report.missing


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, sees_earlier: bool = False
) -> Tensor:
    """Causal attention inside of documents; document_ids: (batch, tokens)."""
    own, its = document_ids[:, None, :, None], document_ids[:, None, None, :]
    is_open = (own >= its if sees_earlier else own == its).tril()
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=is_open)


@pytest.mark.parametrize(("sees_earlier", "verdict"), [(False, "right"), (True, "wrong")])
def test_a_token_sees_no_other_document(sees_earlier: bool, verdict: str) -> None:
    args = (*torch.randn(3, 2, 2, 6, 8).unbind(), torch.tensor([[0, 0, 0, 1, 1, 1]] * 2))
    report = check(
        packed_attention,
        args=args,
        kwargs={"sees_earlier": sees_earlier},
        expect=regard.spec(causal=True, documents="document_ids"),
    )
    assert report.verdict == verdict, report
