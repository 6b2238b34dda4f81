"""The line that a finding names is the one where the mistake is written, and not where it shows."""

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import check, spec

HERE = "# here"


class Layer(nn.Module):
    """Attention of two heads, with a part for each mistake to change."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.scale = (dim // 2) ** -0.5

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        return tuple(t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))  # pyright: ignore

    def merged(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Buffer(Layer):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(64, 64).tril(1)  # here
        self.register_buffer("mask", mask.view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        n = x.shape[1]
        scores = q @ k.mT * self.scale
        scores = scores.masked_fill(self.mask[..., :n, :n] == 0, -math.inf)
        return self.merged(scores.softmax(-1), v)


class Window(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        at = torch.arange(x.shape[1])
        far = at[:, None] - at > 3  # here
        later = at[:, None] < at
        scores = (q @ k.mT * self.scale).masked_fill(far | later, -math.inf)
        return self.merged(scores.softmax(-1), v)


class Scale(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 16**-0.5  # here

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merged((q @ k.mT * self.factor).softmax(-1), v)


class TwiceScaled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q = q * self.scale
        scores = q @ k.mT
        scores = scores * self.scale  # here
        return self.merged(scores.softmax(-1), v)


class Axis(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Softmax(dim=1)  # here

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merged(self.attend(q @ k.mT * self.scale), v)


class Divisor(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT * self.scale).exp()
        total = weights.sum(-2, keepdim=True)  # here
        weights = weights / total
        return self.merged(weights, v)


class OfQueries(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(x)
        keep = mask.bool()[:, None, :, None]  # here
        scores = q @ k.mT * self.scale
        scores = scores.masked_fill(~keep, -1e9)
        return self.merged(scores.softmax(-1), v)


def turned(x: Tensor, base: float) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class TurnedValue(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q = turned(q, 100.0)
        k = turned(k, 100.0)
        v = turned(v, 100.0)  # here
        return self.merged((q @ k.mT * self.scale).softmax(-1), v)


class Dropped(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.chance = 0.1

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        dropout_p = self.chance  # here
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        return self.out(out.transpose(1, 2).flatten(2))


class OneSplit(Layer):
    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, _, v = self.split(x)
        k = self.qkv(x).chunk(3, -1)[1].reshape(b, 2, n, 8)  # here
        return self.merged((q @ k.mT * self.scale).softmax(-1), v)


class OtherName(Layer):
    """Its methods call their object by another name."""

    def __init__(me) -> None:
        super().__init__()
        me.factor = 16**-0.5  # here

    def forward(me, x: Tensor) -> Tensor:
        q, k, v = me.split(x)
        return me.merged((q @ k.mT * me.factor).softmax(-1), v)


class WeakFill(Layer):
    low: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(-2.0))  # here

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = q @ k.mT * self.scale
        scores = scores.masked_fill(later, self.low)
        return self.merged(scores.softmax(-1), v)


def line_of(kind: type) -> int:
    """Return the number of the marked line of a class."""
    lines, first = inspect.getsourcelines(kind)
    return first + next(n for n, line in enumerate(lines) if HERE in line)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        (Buffer, "causal-off-by-one", {"causal": True}),
        (Window, "window", {"causal": True, "window": 3}),
        (Scale, "scale-by-embed-dim", {}),
        (TwiceScaled, "wrong-scale", {}),
        (Axis, "softmax-wrong-axis", {}),
        (Divisor, "softmax-wrong-axis", {}),
        (OfQueries, "padding-on-queries", {"padding": {"mask": "True keeps"}}),
        (TurnedValue, "values", {"positions": "rotary"}),
        (Dropped, "dropout-in-eval", {}),
        (OneSplit, "heads-split-without-transpose", {}),
        (OtherName, "scale-by-embed-dim", {}),
        (WeakFill, "mask-fill-value", {"causal": True}),
    ],
)
def test_a_finding_names_the_line_where_the_mistake_is_written(
    kind: type[nn.Module], name: str, options: dict[str, Any]
) -> None:
    report = check(kind(), expect=spec(heads=2, **options))
    [finding] = [finding for finding in report.findings if finding.name == name]
    assert (finding.file, finding.line) == (__file__, line_of(kind)), report


def test_a_window_without_the_query_itself_is_told() -> None:
    class Past(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            away = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
            hidden = (away >= 5) | (away <= 0)
            scores = (q @ k.mT * self.scale).masked_fill(hidden, -1e9)
            return self.merged(scores.softmax(-1), v)

    report = check(Past(), expect=spec(heads=2, causal=True, window=5))
    assert report.verdict == "wrong", report


@pytest.mark.full
def test_the_mask_of_another_text_is_tried() -> None:
    class Cross(Layer):
        def forward(
            self, x: Tensor, encoder_states: Tensor, encoder_mask: Tensor | None = None
        ) -> Tensor:
            q, (_, k, v) = self.split(x)[0], self.split(encoder_states)
            scores = q @ k.mT * self.scale
            if encoder_mask is not None:
                scores = scores.masked_fill(encoder_mask[:, None, None] == 0, -math.inf)
            return self.merged(scores.softmax(-1), v)

    expected = spec(heads=2, padding={"encoder_mask": "True keeps"})
    assert check(Cross(), expect=expected).ok


def keys_for_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = F.softmax(query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5, dim=-1)
    return weights @ key  # here


def test_a_product_is_named_by_the_users_line_and_not_by_the_kernel_beside_it() -> None:
    [finding] = check(keys_for_values).findings
    lines, start = inspect.getsourcelines(keys_for_values)
    assert (finding.name, finding.line) == (
        "wrong-values",
        next(start + at for at, line in enumerate(lines) if HERE in line),
    )
