"""What is expected of attention: written, printed, contradicted, and compared with what it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from cases import full_but
from regard.diagnosis.expectation import spec_of_json


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class Layer(nn.Module):
    """Attention of which each fact can be chosen."""

    def __init__(
        self,
        dim: int = 32,
        heads: int = 4,
        *,
        window: int | None = None,
        base: float | None = None,
        slopes: tuple[float, ...] = (),
        cap: float | None = None,
        kv_heads: int = 4,
        scale: float | None = None,
        sinks: bool = False,
        prefix: int = 0,
        norms: str = "",
    ) -> None:
        super().__init__()
        width = dim // heads
        self.heads, self.kv_heads, self.base, self.cap = heads, kv_heads, base, cap
        self.scale = width**-0.5 if scale is None else scale
        self.window, self.slopes = window, torch.tensor(slopes)
        self.prefix, self.norms = prefix, norms
        self.sink = nn.Parameter(torch.randn(heads)) if sinks else None
        self.q, self.o = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k, self.v = (nn.Linear(dim, kv_heads * width) for _ in range(2))

    def turned(self, x: Tensor) -> Tensor:
        if self.base is None:
            return x
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] * self.base ** -(torch.arange(half) / half)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (f(x).view(b, t, self.kv_heads, -1).transpose(1, 2) for f in (self.k, self.v))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        q, k = (
            nn.functional.rms_norm(y, y.shape[-1:]) if role in self.norms else y
            for role, y in (("q", q), ("k", k))
        )
        scores = self.turned(q) @ self.turned(k).mT * self.scale
        if self.cap is not None:
            scores = self.cap * (scores / self.cap).tanh()
        gap = torch.arange(t)[:, None] - torch.arange(t)
        if len(self.slopes):
            scores = scores - self.slopes[:, None, None] * gap.abs()
        hidden = gap < 0 if self.window is None else (gap < 0) | (gap >= self.window)
        hidden = hidden & (torch.arange(t) >= self.prefix)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sink is not None:
            beside = self.sink[:, None, None].expand(b, -1, t, 1)
            weights = torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, d))


# Facts are read as they are, and another expectation is wrong by the name of the fact

FACTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "window": ({"window": 16}, {"window": 16}, {"window": 17}, "window"),
    "base": (
        {"base": 500000.0},
        {"positions": {"kind": "rotary", "base": 500000.0}},
        {"positions": {"kind": "rotary", "base": 10000.0}},
        "positions",
    ),
    "pairing": (
        {"base": 100.0},
        {"positions": {"kind": "rotary", "pairing": "halves"}},
        {"positions": {"kind": "rotary", "pairing": "neighbours"}},
        "positions",
    ),
    "slopes": (
        {"slopes": (0.5, 0.25, 0.125, 0.0625)},
        {"positions": {"kind": "alibi", "slopes": [0.5, 0.25, 0.125, 0.0625]}},
        {"positions": {"kind": "alibi", "slopes": [0.25, 0.0625, 0.015625, 0.00390625]}},
        "positions",
    ),
    "cap": ({"cap": 5.0}, {"softcap": 5.0}, {"softcap": 50.0}, "softcap"),
    "kv_heads": ({"kv_heads": 2}, {"kv_heads": 2}, {}, "kv_heads"),
    "scale": ({"scale": 0.25}, {"scale": 0.25}, {}, "wrong-scale"),
    "sinks": ({"sinks": True}, {"sinks": True}, {}, "sinks"),
    "heads": ({}, {"heads": 4}, {"heads": 8}, "heads"),
    "causal": ({}, {"causal": True}, {"causal": False}, "causal"),
    "prefix": ({"prefix": 3}, {"prefix": 3}, {"prefix": 4}, "prefix"),
    "no prefix": ({}, {"causal": True}, {"prefix": 3}, "prefix"),
    "qk_norm": ({"norms": "qk"}, {"qk_norm": "rms"}, {"qk_norm": "l2"}, "qk_norm"),
    "norm of queries": ({"norms": "q"}, {}, {"qk_norm": "rms"}, "qk_norm"),
    "norm of keys": ({"norms": "k"}, {}, {"qk_norm": "rms"}, "qk_norm"),
}


@pytest.mark.parametrize("name", full_but({name: name for name in FACTS}, "window", "scale"))
def test_a_fact_that_is_expected_is_right_and_another_one_is_wrong(name: str) -> None:
    options, meant, other, told = FACTS[name]
    torch.manual_seed(0)
    layer = Layer(**options)
    report = regard.check(layer, expect=regard.spec(**meant))
    assert report.verdict == "right", report
    wrong = regard.check(layer, expect=regard.spec(**other))
    assert told in [finding.name for finding in wrong.faults], wrong


# It takes a second, and all facts are pinned by one way of writing them.
@pytest.mark.parametrize("name", full_but({name: name for name in FACTS}, "slopes"))
def test_the_call_that_a_report_ends_with_pins_what_the_code_computes(name: str) -> None:
    torch.manual_seed(0)
    layer = Layer(**FACTS[name][0])
    report = regard.check(layer)
    assert report.computes is not None
    pinned = report.computes.spec
    assert repr(pinned) in report.pin
    assert regard.check(layer, expect=pinned).verdict == "right"
    assert regard.check(layer, expect=spec_of_json(pinned.to_json())).verdict == "right"


def test_the_longest_input_is_longer_than_each_number_that_the_module_keeps() -> None:
    report = regard.check(Layer(window=16))
    assert report.computes is not None
    assert "to 37 tokens" in report.computes.domain
    assert "a window of 16 keys" in report.computes.facts[0]


# Written and printed


def test_a_spec_is_printed_as_a_sentence_and_a_line_of_json() -> None:
    meant = regard.spec(causal=True, window=4, padding={"mask": "True hides"})
    assert str(meant).splitlines() == [
        "Attention, causal, a window of 4 keys, mask: True hides.",
        '{"causal": true, "window": 4, "padding": {"mask": "True hides"}}',
    ]
    assert spec_of_json(meant.to_json()) == meant
    assert eval(repr(meant), {"regard": regard}) == meant


def test_any_value_stays_any_value_in_json() -> None:
    meant = regard.spec(scale=regard.ANY)
    assert meant.to_json() == '{"scale": "any"}'
    assert spec_of_json(meant.to_json()).scale is regard.ANY


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"causal": False, "window": 4}, ValueError, "Pass window=\\(3, 3\\)"),
        ({"causal": True, "window": (3, 1)}, ValueError, "has 1 keys after the query's own"),
        ({"heads": 4, "kv_heads": 3}, ValueError, "contradict each other"),
        ({"causal": "yes"}, TypeError, "must be True, False or regard.ANY"),
        ({"window": 0}, ValueError, "its own included"),
        ({"window": (1, 2, 3)}, ValueError, "a pair is"),
        ({"scale": -1.0}, ValueError, "must be a positive number"),
        ({"scale": "big"}, TypeError, "must be a number"),
        ({"positions": "sinusoidal"}, ValueError, "must be one of"),
        ({"positions": 3}, TypeError, "a kind or a dict"),
        ({"positions": {"kind": "alibi", "base": 2}}, ValueError, "alibi positions take slopes"),
        ({"positions": {"kind": "rotary", "pairing": "odd"}}, ValueError, '"halves"'),
        ({"bias": "some"}, ValueError, "'given', 'learned'"),
        ({"padding": "mask"}, TypeError, "a dict of meanings"),
        ({"padding": {"mask": "hides"}}, ValueError, "'True keeps'"),
        ({"documents": 3}, TypeError, "names of arguments"),
        ({"heads": 0}, ValueError, "at least 1"),
        ({"causal": True, "prefix": 3}, ValueError, "Leave causal out"),
        ({"window": 3, "prefix": 3}, ValueError, "not read together"),
    ],
)
def test_a_spec_that_contradicts_itself_or_says_nothing_is_refused(
    values: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        regard.spec(**values)


def test_what_contradicts_a_spec_is_refused_before_anything_runs() -> None:
    def never(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        raise AssertionError("it ran")

    with pytest.raises(ValueError, match="causal=True contradicts expect"):
        regard.check(never, causal=True, expect=regard.spec(causal=False))
    with pytest.raises(TypeError, match="it must be a spec"):
        regard.check(never, expect={"causal": True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expect says what 'masc' hides; the arguments are"):
        regard.check(never, expect=regard.spec(padding={"masc": "True hides"}))
    with pytest.raises(ValueError, match="means says 'True keeps' of mask"):
        regard.check(
            never,
            means={"mask": "True keeps"},
            expect=regard.spec(padding={"mask": "True hides"}),
        )


def test_a_plain_function_has_no_fact_to_pin_but_causality() -> None:
    report = regard.check(standard)
    assert report.pin == "regard.check(standard, expect=regard.spec(causal=False))"


@pytest.mark.full
def test_the_pin_of_what_has_no_name_is_the_expectation_alone() -> None:
    for thing in (lambda q, k, v: standard(q, k, v).clone(), Layer(32, 4, prefix=3)):
        pin = regard.check(thing).pin
        assert pin.startswith("expect=regard.spec("), pin
        assert regard.check(thing, **eval(f"dict({pin})", {"regard": regard})).ok


class Centred(nn.Module):
    """Attention under a causal mask, on tokens from which their mean was taken."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x - x.mean(1, keepdim=True)).chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_a_later_token_that_moves_an_output_beside_the_mask_is_wrong() -> None:
    report = regard.check(Centred, 8, expect=regard.spec(causal=True))
    (finding,) = report.faults
    assert (report.verdict, finding.name) == ("wrong", "causal")
    assert "by a way that is not the attention" in str(report)
