"""Fused functions of query, key and value, judged in the dtype and on the device that they need."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.diagnosis.expectation import Spec
from regard.diagnosis.report import Report
from regard.testing import assert_attention

Attend = Callable[[Tensor, Tensor, Tensor], Any]

CAUSAL, FULL = regard.spec(causal=True), regard.spec(causal=False)
HALF = torch.bfloat16


def visible(q: Tensor, k: Tensor, left: float = math.inf) -> Tensor:
    away = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    away = away - (k.shape[-2] - q.shape[-2])
    return (away <= 0) & (away > -left)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores_of(q, k).masked_fill(~visible(q, k), -torch.inf).softmax(-1)
    return weights.nan_to_num() @ v


def causal_with_finite_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).masked_fill(~visible(q, k), -1e4).softmax(-1) @ v


def of_equal_lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[-2] != k.shape[-2]:
        raise ValueError("query and key have other lengths")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def window_of_16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores_of(q, k).masked_fill(~visible(q, k, 16), -torch.inf).softmax(-1)
    return weights.nan_to_num() @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (4 * (0.2 * (q @ k.mT) / 4).tanh()).softmax(-1) @ v


def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def of_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.ndim == 3, "it takes (batch, tokens, dim)"
    return full(q, k, v)


def with_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return full(q, k, v), scores_of(q, k).logsumexp(-1)


RIGHT: dict[str, tuple[Attend, Spec]] = {
    "PyTorch's": (full, FULL),
    "grouped heads": (grouped, FULL),
    "grouped heads that are named": (grouped, regard.spec(causal=False, heads=6, kv_heads=2)),
    "causal": (causal, CAUSAL),
    "causal with finite numbers": (causal_with_finite_numbers, CAUSAL),
    "equal lengths alone": (of_equal_lengths, CAUSAL),
    "a window": (window_of_16, regard.spec(window=16)),
    "a window as a pair": (window_of_16, regard.spec(window=(15, 0))),
    "a cap": (capped, regard.spec(causal=False, scale=0.2, softcap=4)),
    "tokens before heads": (tokens_first, FULL),
    "one head": (of_one_head, FULL),
    "a tuple": (with_logsumexp, FULL),
}


# A kernel is tried on about 20 inputs, in seconds: the second dtype meets one kernel in make test.
SECOND = ("PyTorch's", torch.float32)
ANOTHER_NAME = {
    *("grouped heads that are named", "a window as a pair", "a tuple", "one head"),
    *("causal with finite numbers", "equal lengths alone", "a cap", "a window"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if quick else pytest.mark.full)
        for name in RIGHT
        for dtype in (HALF, torch.float32, torch.float16, torch.float64)
        for quick in [(dtype == HALF and name not in ANOTHER_NAME) or (name, dtype) == SECOND]
    ],
)
def test_a_right_kernel_passes_in_its_own_dtype(name: str, dtype: torch.dtype) -> None:
    call, expected = RIGHT[name]
    report = regard.check(call, expect=expected, run_dtype=dtype)
    assert report.verdict == "right", report
    assert report.computes is not None
    assert "with gradients" in report.computes.domain


def zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)


def correlated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """mlir-air#1427: its output has the correlation 0.13 with that of attention."""
    output = full(q, k, v)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return (0.13 * output + 0.99 * output.std() * noise).to(q.dtype)


def top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def without_the_last_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = k.shape[-2] // 64 * 64 or k.shape[-2]
    return full(q, k[..., :count, :], v[..., :count, :])


def without_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    each = scores_of(q, k).float().exp()
    return (each / each.sum(-1, keepdim=True)).to(q.dtype) @ v


def with_nan_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).masked_fill(~visible(q, k), -torch.inf).softmax(-1) @ v


def with_an_added_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
    weights = (scores_of(q, k) + hidden.masked_fill(~visible(q, k), -torch.inf)).softmax(-1)
    return weights.masked_fill(~visible(q, k).any(-1, keepdim=True), 0.0) @ v


def with_rubbish_in_empty_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(visible(q, k).any(-1, keepdim=True), causal(q, k, v), 0.3)


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def tiled_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = q.shape[1] // k.shape[1]
    return full(q, k.repeat(1, count, 1, 1), v.repeat(1, count, 1, 1))


def without_strides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(*(t.as_strided(t.shape, torch.empty(t.shape).stride()) for t in (q, k, v)))


def without_a_gradient_of_the_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(q, k.detach(), v)


def writing_into_the_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q.data.mul_(q.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def started_at_0(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k).float()
    each = (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()
    return (each / each.sum(-1, keepdim=True)).to(q.dtype) @ v


def of_the_last_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The largest score of each tile replaces that of the tiles before it."""
    total, output = torch.zeros(*q.shape[:-1], 1), torch.zeros(q.shape)
    largest = torch.full_like(total, -torch.inf)
    for first in range(0, k.shape[-2], 64):
        key, value = (t[..., first : first + 64, :] for t in (k, v))
        scores = scores_of(q, key).float()
        of_tile = scores.amax(-1, keepdim=True)
        kept, each = (largest - of_tile).exp(), (scores - of_tile).exp()
        total = total * kept + each.sum(-1, keepdim=True)
        output, largest = output * kept + each @ value.float(), of_tile
    return (output / total).to(q.dtype)


def scaled_for_64_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.125)


def with_columns_together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(q, k.as_strided(k.shape, (*k.stride()[:-1], 1)), v)


def of_4_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output = grouped(q, k, v)
    return torch.cat([output[:, :4], 0 * output[:, 4:]], 1)


def of_512_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return full(q, k[..., :512, :], v[..., :512, :])


_LAST: dict[torch.Size, Tensor] = {}


def in_one_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    buffer = _LAST.setdefault(q.shape, torch.empty_like(q).detach())
    return buffer.copy_(full(q.detach(), k.detach(), v.detach()))


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    away = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    seen = away <= k.shape[-2] - q.shape[-2] + 1
    return scores_of(q, k).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ v


class WithoutRowSums(torch.autograd.Function):
    """A backward pass that forgets to take the sum of each row off."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return full(q, k, v)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v = cast("tuple[Tensor, ...]", ctx.saved_tensors)  # type: ignore[attr-defined]
        weights, scale = scores_of(q, k).softmax(-1), q.shape[-1] ** -0.5
        of_scores = weights * (gradients[0] @ v.mT)
        return of_scores @ k * scale, of_scores.mT @ q * scale, weights.mT @ gradients[0]


WRONG: dict[str, tuple[Attend, Spec, str, str]] = {
    "zeros": (zeros, FULL, "output", "The output is 0 everywhere."),
    "a correlation of 0.13": (correlated, FULL, "output", "The output is not that of"),
    "no causal mask": (full, CAUSAL, "not-causal", ""),
    "a causal mask": (of_equal_lengths, FULL, "output", "It is attention with a causal mask"),
    "the mask at the top left": (top_left, CAUSAL, "causal-top-left", ""),
    "the next key": (shifted, CAUSAL, "causal-off-by-one", ""),
    "no window": (causal, regard.spec(window=16), "output", "It is attention with no window."),
    "a shorter window": (window_of_16, regard.spec(window=17), "output", "a window of 15 keys"),
    "no last tile": (without_the_last_tile, FULL, "output", "The output is not that of"),
    "no largest score": (without_the_largest, FULL, "output", "The output is not finite."),
    "NaN in rows without keys": (with_nan_rows, CAUSAL, "nan-rows", ""),
    "NaN under the mask": (with_an_added_mask, CAUSAL, "output", "A key of NaN"),
    "rows without keys": (
        with_rubbish_in_empty_rows,
        CAUSAL,
        "output",
        "sees no key gives neither",
    ),
    "no scale": (unscaled, FULL, "no-scale", ""),
    "no cap": (full, regard.spec(causal=False, softcap=1), "output", "with no softcap."),
    "heads 0 1 0 1": (tiled_heads, FULL, "kv-heads-repeated-in-wrong-order", ""),
    "strides": (without_strides, FULL, "output", "The output is not that of"),
    "no gradient": (
        without_a_gradient_of_the_key,
        FULL,
        "gradient",
        "No gradient reaches the key.",
    ),
    "a wrong gradient": (WithoutRowSums.apply, FULL, "gradient", "The gradient of the query"),
    "a largest score of 0": (started_at_0, FULL, "output", "The output is not finite."),
    "the last tile's largest score": (of_the_last_tile, FULL, "output", "not finite."),
    "a scale of 64 columns": (scaled_for_64_columns, FULL, "output", "The output is not that of"),
    "columns of keys": (with_columns_together, FULL, "output", "The output is not that of"),
    "4 heads at most": (of_4_heads, FULL, "output", "The output is not that of"),
    "512 keys at most": (of_512_keys, FULL, "output", "The output is not that of"),
    "one buffer": (in_one_buffer, FULL, "pure", "A later call changes the output of an earlier"),
    "written inputs": (writing_into_the_query, FULL, "pure", "It writes into its inputs."),
}


# Those that are not the output of attention for one more reason take longest.
ONE_MORE = {
    *("a correlation of 0.13", "no last tile", "columns of keys", "4 heads at most"),
    *("a largest score of 0", "the last tile's largest score", "a scale of 64 columns"),
    *("a shorter window", "no cap", "strides"),
    # Other tests have these, beside another mistake or in tiles.
    *("no causal mask", "no scale", "no largest score", "no gradient"),
    *("512 keys at most", "no window", "rows without keys", "heads 0 1 0 1"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if quick else pytest.mark.full)
        for name in WRONG
        for dtype in (HALF, torch.float16, torch.float32)
        for quick in [dtype == HALF and name not in ONE_MORE]
    ],
)
def test_a_wrong_kernel_is_named(name: str, dtype: torch.dtype) -> None:
    call, expected, mistake, sentence = WRONG[name]
    report = regard.check(call, expect=expected, run_dtype=dtype)
    found = {finding.name: finding.fault.sentence for finding in reversed(report.findings)}
    assert report.verdict == "wrong"
    assert mistake in found, report
    assert sentence in found[mistake]


def test_a_kernel_is_asserted_in_three_lines() -> None:
    assert_attention(causal, expect=CAUSAL, run_dtype=HALF, run_device="cpu")
    with pytest.raises(AssertionError, match="not-causal"):
        assert_attention(full, expect=CAUSAL, run_dtype=HALF, run_device="cpu")


@pytest.mark.full
def test_two_mistakes_are_two_findings() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.detach(), v, scale=1.0)

    report = regard.check(both, expect=FULL, run_dtype=HALF)
    assert [finding.name for finding in report.faults] == ["gradient", "no-scale"]


def pinned(report: Report) -> str:
    return report.pin.partition("expect=")[2]


def test_a_window_on_both_sides_is_not_called_causal() -> None:
    def both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = regard.SlidingWindow(4, 4).to_dense(q.shape[-2], k.shape[-2])
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return scores.softmax(-1).nan_to_num() @ v

    meant = regard.spec(window=(4, 4))
    report = regard.check(both_sides, expect=meant, run_dtype=torch.float32)
    assert report.computes is not None
    assert report.computes.spec == regard.spec(causal=False, window=(4, 4)), report


@pytest.mark.full
def test_what_a_kernel_computes_is_measured_where_nothing_is_expected() -> None:
    report = regard.check(of_equal_lengths, run_dtype=HALF)
    assert str(report).startswith(
        "of_equal_lengths computes softmax(q·kᵀ/√64 + mask)·v, 4 heads of 64, causal"
    )
    assert pinned(report).startswith("regard.spec(causal=True), run_dtype=torch.bfloat16")
    assert pinned(regard.check(full, run_dtype=HALF)).startswith("regard.spec(causal=False)")


def test_what_a_kernel_refuses_is_said() -> None:
    notes = "\n".join(regard.check(of_equal_lengths, expect=CAUSAL, run_dtype=HALF).notes)
    refused = "5 queries and 133 keys; 77 queries and 133 keys; 133 queries and 77 keys"
    assert f"It refuses {refused} (ValueError: query and key have other lengths)." in notes
    assert "It refuses 8 heads of queries and 2 of keys, 77 tokens (RuntimeError" in notes


def in_tiles(call: Attend) -> Attend:
    def of_whole_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[-2] % 16 or k.shape[-2] % 16:
            raise ValueError("lengths must be multiples of 16")
        return call(q, k, v)

    return of_whole_tiles


@pytest.mark.full
def test_a_kernel_of_whole_tiles_is_tried_with_them() -> None:
    report = regard.check(in_tiles(causal), expect=CAUSAL, run_dtype=HALF)
    assert report.verdict == "right", report
    assert report.computes is not None
    assert "of 128 to 640 tokens, 8 with gradients" in report.computes.domain
    for call, expected, mistake, _ in (WRONG[name] for name in ("no largest score", "no gradient")):
        report = regard.check(in_tiles(call), expect=expected, run_dtype=HALF)
        assert [finding.name for finding in report.faults] == [mistake]


@pytest.mark.full
def test_a_window_that_does_not_show_is_no_verdict() -> None:
    expected = regard.spec(window=200)
    assert regard.check(causal, expect=expected, run_dtype=HALF).verdict == "wrong"
    report = regard.check(causal, expect=regard.spec(window=5000), run_dtype=HALF)
    assert report.verdict == "cannot tell"
    assert "a window of 5000 keys does not show in 600 tokens" in report.missing


def test_a_kernel_of_unknown_axes_is_no_verdict() -> None:
    def split(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], 4, -1).transpose(1, 2)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.ndim == 3, "it takes (batch, tokens, heads · dim)"
        return full(split(q), split(k), split(v)).transpose(1, 2).reshape(q.shape)

    report = regard.check(packed, expect=FULL, run_dtype=HALF)
    assert report.verdict == "cannot tell"
    assert "its axes are unknown" in report.missing


@pytest.mark.full
def test_a_kernel_without_a_backward_pass_is_right_and_says_so() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return full(q, k, v)

    def strict(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.requires_grad:
            raise NotImplementedError("no backward pass")
        return full(q, k, v)

    for call, note in (
        (forward, "Its output has no gradient"),
        (strict, "inputs that need a grad"),
    ):
        report = regard.check(call, expect=FULL, run_dtype=HALF)
        assert report.verdict == "right", report
        assert any(note in said for said in report.notes)
        assert report.computes is not None
        assert ", 0 with gradients" in report.computes.domain


@pytest.mark.full
def test_a_crash_of_the_device_is_no_refusal() -> None:
    def crashes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[-2] % 64:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return full(q, k, v)

    report = regard.check(crashes, expect=FULL, run_dtype=HALF)
    assert [finding.name for finding in report.faults] == ["runs"]


@pytest.mark.full
def test_axes_say_what_two_kernels_may_mean() -> None:
    report = regard.check(tokens_first, expect=FULL, run_dtype=HALF)
    assert report.read_as == "(batch, tokens, heads, dim), in bfloat16 on cpu"
    axes = "batch heads tokens dim"
    assert regard.check(tokens_first, expect=FULL, run_dtype=HALF, axes=axes).verdict == "wrong"


@pytest.mark.full
def test_what_a_module_takes_besides_is_passed() -> None:
    def flagged(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        return of_equal_lengths(q, k, v) if causal else full(q, k, v)

    for flag in (True, False):
        report = regard.check(flagged, expect=regard.spec(causal=flag), run_dtype=HALF)
        assert report.verdict == "right", report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_dtype": "bf16"}, "run_dtype is 'bf16'; it must be a dtype"),
        ({"run_dtype": torch.int8}, "run_dtype is torch.int8; it must be one of"),
        ({"run_device": "nowhere"}, "run_device is 'nowhere', where nothing runs"),
        ({"run_device": "meta"}, "run_device is 'meta', whose tensors have no numbers"),
        ({"run_dtype": HALF, "args": (1,)}, "args is given; with run_dtype or run_device check"),
        ({"run_dtype": HALF, "means": {"k": "True keeps"}}, "means is given"),
        ({"run_dtype": HALF, "axes": "b h t d"}, "axes is 'b h t d'; those of a kernel must be"),
        ({"run_dtype": HALF, "axes": {"q": "batch"}}, "it must be a text"),
        ({"run_dtype": HALF, "expect": regard.spec(bias="given")}, "expect says bias='given'"),
        ({"run_dtype": HALF, "expect": regard.spec(sinks=True)}, "expect says sinks=True"),
        ({"run_dtype": HALF, "expect": regard.spec(scale=regard.ANY)}, "Say which scale it has"),
    ],
)
def test_what_a_kernel_is_not_judged_by_is_refused_before_it_runs(
    options: dict[str, object], message: str
) -> None:
    def never(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("it ran")

    with pytest.raises((TypeError, ValueError), match=message):
        regard.check(never, **options)  # type: ignore[arg-type]


def test_a_kernel_that_never_runs_is_an_error_with_its_own_words() -> None:
    def of_one(q: Tensor) -> Tensor:
        return q

    with pytest.raises(ValueError, match=r"of_one fails on every input .* takes 1 positional"):
        regard.check(of_one, run_dtype=HALF)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none")
def test_a_kernel_of_a_gpu_is_judged_there() -> None:
    assert_attention(full, expect=FULL, run_dtype=torch.float16, run_device="cuda")
    with pytest.raises(AssertionError):
        assert_attention(full, expect=CAUSAL, run_dtype=torch.float16, run_device="cuda")
