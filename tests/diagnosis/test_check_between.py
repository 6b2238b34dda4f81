"""What lies between projections and weights: norms, functions, few bits, sums that divide last."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from cases import full_but, in_turn
from regard.diagnosis.report import Report

Change = Callable[[Tensor], Tensor]
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class Heads(nn.Module):
    """Projections, heads, and what is to be judged between them."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.qkv, self.out, self.core = nn.Linear(16, 48), nn.Linear(16, 16), core

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


def both_forms(core: Core) -> list[object]:
    return [Heads(core), core]


FORMS = {"module": 0, "function": 1}


def checked(core: Core, form: str) -> Report:
    return regard.check(both_forms(core)[FORMS[form]])


def names(report: Report) -> set[str]:
    return {finding.name for finding in report.findings} - {"no-positions", "causal-top-left"}


# Functions of queries and keys

FUNCTIONS: dict[str, Change] = {
    "relu": torch.relu,
    "elu": lambda t: F.elu(t) + 1,
    "tanh": torch.tanh,
    "abs": torch.abs,
    "pow": lambda t: t**2,
    "sign": torch.sign,
}


@pytest.mark.sampled(3)
@in_turn(name=list(FUNCTIONS), form=list(FORMS))
def test_a_function_of_queries_and_keys_is_never_right(name: str, form: str) -> None:
    change = FUNCTIONS[name]
    report = checked(lambda q, k, v: standard(change(q), change(k), v), form)
    assert report.verdict == "cannot tell", str(report)
    assert report.computes is not None
    assert report.computes.stage in ("scores", "projection"), str(report)


def turned(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 10.0 ** -torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


@pytest.mark.full
def test_positions_that_turn_queries_alone_are_wrong_in_a_module() -> None:
    report = checked(lambda q, k, v: standard(turned(q), k, v), "module")
    assert report.verdict == "wrong"
    assert report.findings[0].name == "positions"
    assert "positions: rotary of queries alone" in str(report)


@pytest.mark.full
def test_positions_that_turn_keys_alone_are_wrong_in_a_module() -> None:
    report = checked(lambda q, k, v: standard(q, turned(k), v), "module")
    assert report.verdict == "wrong"
    assert "positions: rotary of keys alone" in str(report)


def test_positions_that_turn_queries_alone_are_different_in_a_function() -> None:
    # Its keys may come from a cache, which holds them turned.
    report = checked(lambda q, k, v: standard(turned(q), k, v), "function")
    assert report.verdict == "different"
    assert "rotary of queries alone" in str(report)


def turned_back(x: Tensor) -> Tensor:
    return turned(x.flip(-2)).flip(-2)


def paired_otherwise(x: Tensor) -> Tensor:
    """Angles for neighbours, and a turn of the two halves."""
    angles = torch.arange(x.shape[-2])[:, None] * 10.0 ** -torch.arange(x.shape[-1] // 2)
    angles = angles.repeat_interleave(2, -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_positions_that_turn_keys_the_other_way_are_no_verdict(form: str) -> None:
    report = checked(lambda q, k, v: standard(turned(q), turned_back(k), v), form)
    assert report.verdict == "cannot tell", str(report)
    assert "are projected in another way" in report.missing


@pytest.mark.parametrize("form", full_but({form: form for form in FORMS}, "module"))
def test_pairs_that_are_not_those_of_their_angles_are_no_verdict(form: str) -> None:
    report = checked(lambda q, k, v: standard(paired_otherwise(q), paired_otherwise(k), v), form)
    assert (report.verdict, names(report)) == ("cannot tell", set()), str(report)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_positions_that_turn_both_alike_are_right(form: str) -> None:
    report = checked(lambda q, k, v: standard(turned(q), turned(k), v), form)
    assert (report.verdict, names(report)) == ("right", set()), str(report)


NORMS: dict[str, Change] = {
    "RMS": lambda t: t * t.square().mean(-1, keepdim=True).add(1e-6).rsqrt(),
    "RMS of torch": lambda t: F.rms_norm(t, t.shape[-1:]),
    "layer": lambda t: F.layer_norm(t, t.shape[-1:]),
    "unit length": lambda t: F.normalize(t, dim=-1),
    "RMS, then turned": lambda t: turned(F.rms_norm(t, t.shape[-1:])),
}


@pytest.mark.sampled(1)
@in_turn(name=list(NORMS), form=list(FORMS))
def test_normed_queries_and_keys_are_right(name: str, form: str) -> None:
    norm = NORMS[name]
    report = checked(lambda q, k, v: standard(norm(q), norm(k), v), form)
    assert report.verdict == "right", str(report)
    kind = "layer" if "layer" in name else "L2" if "unit" in name else "RMS"
    assert f"{kind} norm of q and k" in str(report)


# Scales and limits


class Learned(nn.Module):
    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.qkv, self.temperature = nn.Linear(16, 48), nn.Parameter(start)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT * self.temperature).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(torch.tensor(0.7), id="one number"),
        pytest.param(torch.rand(4, 1, 1) + 0.3, id="one for each head"),
    ],
)
def test_a_scale_that_is_learned_is_different_and_right_if_any_is_expected(start: Tensor) -> None:
    report = regard.check(Learned(start))
    assert (report.verdict, names(report)) == ("different", {"wrong-scale"}), str(report)
    assert regard.check(Learned(start), expect=regard.spec(scale=regard.ANY)).verdict == "right"


@pytest.mark.full
def test_one_scale_for_each_head_that_is_below_zero_is_wrong() -> None:
    report = regard.check(Learned(torch.tensor([0.5, 0.5, -0.5, 0.5])[:, None, None]))
    assert (report.verdict, names(report)) == ("wrong", {"wrong-scale"})


LIMITS: dict[str, Change] = {
    "clamp": lambda s: s.clamp(-80, 80),
    "topk": lambda s: s.masked_fill(s < s.topk(min(100, s.shape[-1]), -1).values[..., -1:], -1e9),
}


@pytest.mark.sampled(1)
@in_turn(name=list(LIMITS), form=list(FORMS))
def test_what_would_change_other_scores_alone_is_right(name: str, form: str) -> None:
    change = LIMITS[name]

    def limited(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    report = checked(limited, form)
    assert (report.verdict, names(report)) == ("right", set()), str(report)


def test_the_least_length_of_a_norm_is_no_limit() -> None:
    def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.normalize((q @ k.mT / q.shape[-1] ** 0.5).exp(), p=1, dim=-1) @ v

    assert names(regard.check(divided)) == {"large"}


# Few bits


def narrow(core: Core, dtype: torch.dtype) -> Core:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(q.to(dtype), k.to(dtype), v.to(dtype)).float()

    return attention


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return standard(q, k, v).float()


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


NARROW: dict[str, Core] = {
    "bfloat16": narrow(standard, torch.bfloat16),
    "float16": narrow(standard, torch.float16),
    "a kernel": narrow(F.scaled_dot_product_attention, torch.bfloat16),
    "autocast": under_autocast,
}


@pytest.mark.sampled(1)
@in_turn(name=list(NARROW), form=list(FORMS))
def test_what_computes_in_few_bits_inside_is_judged_in_float32(name: str, form: str) -> None:
    report = checked(NARROW[name], form)
    assert (report.ok, names(report)) == (True, set()), str(report)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_mistake_in_few_bits_is_told(form: str) -> None:
    report = checked(narrow(unscaled, torch.bfloat16), form)
    assert names(report) == {"no-scale"}


def test_a_fill_that_float16_does_not_hold_is_told_where_it_stands_inside() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / q.shape[-1] ** 0.5).half()
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(ahead, -1e9).float().softmax(-1) @ v

    report = regard.check(attention, causal=True)
    [finding] = report.faults
    assert finding.name == "mask-fill-value"
    assert finding.code == "return scores.masked_fill(ahead, -1e9).float().softmax(-1) @ v"


# A sum that divides last


def divided_last(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


def divided_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5).exp()
    total = torch.einsum("...ij->...i", e)
    return torch.einsum("...ij,...jd->...id", e, v) / total[..., None]


def masked_behind_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT / q.shape[-1] ** 0.5).exp().tril()
    return e / e.sum(-1, keepdim=True) @ v


def with_a_key_of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


def less_its_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def test_a_sink_of_1_from_which_the_largest_was_taken_off_is_not_right() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        return e / (1 + e.sum(-1, keepdim=True)) @ v

    report = regard.check(attention)
    assert report.verdict == "cannot tell"
    assert "the rows of weights sum to less than 1, each in its own way" in report.missing


BY_HAND = [
    divided_last,
    divided_by_einsum,
    masked_behind_exp,
    with_a_key_of_nothing,
    less_its_logarithm,
]


# They take the largest score off first; the others overflow where scores are large.
STABLE = {divided_last, less_its_logarithm}


@pytest.mark.sampled(1)
@in_turn(core={core.__name__: core for core in BY_HAND}, form=list(FORMS))
def test_a_softmax_by_hand_is_right_in_whatever_order(core: Core, form: str) -> None:
    report = checked(core, form)
    broken = {result.law.name for result in report.laws if result.breach is not None}
    assert broken == (set() if core in STABLE else {"large"}), str(report)
    assert {finding.name for finding in report.faults} <= broken


@pytest.mark.parametrize("form", full_but({form: form for form in FORMS}, "module"))
def test_an_exp_that_nothing_is_divided_by_is_no_verdict_and_is_named(form: str) -> None:
    def positive(x: Tensor) -> Tensor:
        return (x - x.square().sum(-1, keepdim=True) / 2).exp()

    def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys = positive(q), positive(k)
        return queries @ (keys.mT @ v) / (queries @ keys.sum(-2)[..., None])

    report = checked(linear, form)
    assert report.verdict == "cannot tell"
    # The outputs of a function of query, key and value give its weights; a module's do not.
    reason = "no softmax of scores meets a value"
    of_weights = "the scores are no multiple of query · key"
    assert (of_weights if form == "function" else reason) in report.missing
