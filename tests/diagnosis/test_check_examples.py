"""Code whose arguments an example call shows."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard.testing import assert_attention


def qkv(*shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=generator) for _ in range(3))


def by_numpy(q: Any, k: Any, v: Any, *, divides: bool = True) -> Any:
    scores = q @ k.swapaxes(-1, -2) / (np.sqrt(q.shape[-1]) if divides else 1.0)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


def rotary(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotary_of_queries(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(turned(q, cos, sin), k, v, is_causal=True)


def with_types(q: Tensor, k: Tensor, v: Tensor, types: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k + types[1], v)


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    ends = cu_seqlens.tolist()
    parts = [
        F.scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v)))
        for a, b in pairwise(ends)
    ]
    return torch.cat(parts, 1).transpose(0, 1)


def packed_as_one(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)


class OfImages(nn.Module):
    def __init__(self, channels: int, *, divides: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.scale = channels**-0.5 if divides else 1.0

    def forward(self, image: Tensor) -> Tensor:
        q, k, v = self.qkv(image).flatten(2).mT.chunk(3, -1)
        output = (q @ k.mT * self.scale).softmax(-1) @ v
        return image + output.mT.view_as(image)


ANGLES = torch.arange(7)[:, None] * 10000 ** -(torch.arange(8) % 4 / 4)
ENDS = torch.tensor([0, 3, 5])

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, set[str]]] = {
    "numpy": (by_numpy, tuple(np.random.RandomState(0).randn(3, 2, 7, 8)), "right", set()),
    "rotary": (rotary, (*qkv(2, 4, 7, 8), ANGLES.cos(), ANGLES.sin()), "right", set()),
    "rotary of queries": (
        rotary_of_queries,
        (*qkv(2, 4, 7, 8), ANGLES.cos(), ANGLES.sin()),
        "different",
        set(),
    ),
    "table as long as the batch": (with_types, (*qkv(2, 7, 8), torch.rand(2, 8)), "right", set()),
    "packed": (packed, (*qkv(5, 2, 4), ENDS), "right", set()),
    "packed as one": (packed_as_one, (*qkv(5, 2, 4), ENDS), "right", set()),
    "image": (OfImages(8), (torch.randn(2, 8, 2, 3),), "right", set()),
    "image, no scale": (
        OfImages(8, divides=False),
        (torch.randn(2, 8, 2, 3),),
        "different",
        set(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_example_call_shows_what_arguments_are(name: str) -> None:
    thing, args, verdict, laws = CASES[name]
    report = regard.check(thing, args=args)
    broken = {result.law.name for result in report.laws if result.outcome == "broken"}
    assert (report.verdict, broken) == (verdict, laws), report


def test_a_numpy_function_runs_without_an_example() -> None:
    assert regard.check(by_numpy).ok


def test_a_mistake_in_numpy_is_told() -> None:
    args = tuple(np.random.RandomState(0).randn(3, 2, 7, 8))
    report = regard.check(by_numpy, args=args, kwargs={"divides": False})
    assert [finding.name for finding in report.differences] == ["no-scale"]
    assert report.differences[0].detail == "scale: 1; the standard: 1/√8 = 0.3536."


def hidden(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(mask[:, None, None, :], float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize(
    ("means", "verdict"),
    [("True hides", "right"), ("True keeps", "wrong"), ("", "right")],
    ids=["hides", "keeps", "nothing"],
)
def test_the_caller_says_what_a_mask_means(means: str, verdict: str) -> None:
    mask = torch.arange(7) > torch.tensor([[4], [5]])
    args = (*qkv(2, 4, 7, 8), mask)
    report = regard.check(hidden, args=args, means={"mask": means} if means else None)
    assert report.verdict == verdict, report
    assert "True or 1 of mask hides a key" in str(report)


def test_what_cannot_be_guessed_ends_with_the_call_to_copy() -> None:
    def dated(q: Tensor, k: Tensor, v: Tensor, days: Tensor) -> Tensor:
        return v

    with pytest.raises(ValueError, match=r"args=\(torch.randn\(2, 7, 24\), .*'days': \.\.\.\}"):
        regard.check(dated)


class MeanPool(nn.Module):
    """Pool tokens with their mean as the query; a square input without a batch also runs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = torch.cat([x.mean(0, keepdim=True), x])
        return self.attention(x[:1], x, x, need_weights=False)[0].squeeze(0)


def test_a_layer_that_pools_is_not_judged_by_an_input_that_runs_by_chance() -> None:
    with pytest.raises(ValueError, match=r"gave \(2, 16\) for .*\n.* pools them"):
        regard.check(MeanPool)


def test_an_example_that_does_not_fit_is_one_clear_error() -> None:
    with pytest.raises(TypeError, match=r"the example does not fit hidden: "):
        regard.check(hidden, args=qkv(2, 4, 7, 8))


def test_a_comment_decides_nothing() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The cache holds what is past: mask == 0, b, t = x.shape
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert regard.check(attention).verdict == "right"


def test_flex_attention_is_judged_by_its_definition() -> None:
    def sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda score, *_: score * 2)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)

    assert regard.check(sharp, args=qkv(1, 2, 7, 8)).verdict == "different"
    assert regard.check(plain, args=qkv(1, 2, 7, 8)).verdict == "right"


def test_an_operation_that_takes_a_function_is_one_clear_error() -> None:
    def attention(x: Tensor) -> Tensor:
        def softmax(y: Tensor) -> Tensor:
            return y.softmax(-1)

        def negative(y: Tensor) -> Tensor:
            return -y

        chosen: Tensor = torch.cond(x.sum() > 0, softmax, negative, (x,))  # pyright: ignore
        return chosen

    error = r"^attention cannot be judged\. It calls cond, whose function check cannot look into\."
    with pytest.raises(ValueError, match=error):
        regard.check(attention)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_as_before_once_it_was_checked() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)

    regard.check(attention, args=qkv(1, 2, 7, 8))
    query, key, value = qkv(1, 2, 7, 8)
    mask = regard.Causal()
    expected = regard.attend(query, key, mask=mask) @ value
    block_mask = create_block_mask(lambda _b, _h, i, j: i >= j, 1, 2, 7, 7, device="cpu")
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=block_mask), expected)


# In other people's tests


def test_right_attention_passes_the_assertion() -> None:
    assert_attention(rotary, args=CASES["rotary"][1], causal=True)


def test_wrong_attention_raises_with_the_report() -> None:
    meant = regard.spec(documents="ends")
    with pytest.raises(AssertionError, match="packed_as_one is wrong: documents"):
        assert_attention(packed_as_one, args=CASES["packed as one"][1], expect=meant)


def test_what_is_different_from_the_standard_is_a_warning_unless_it_is_expected() -> None:
    layer = OfImages(8, divides=False)
    image = (torch.randn(2, 8, 2, 3),)
    with pytest.warns(UserWarning, match="OfImages is different from standard attention: no-scale"):
        assert_attention(layer, args=image)
    assert_attention(layer, args=image, expect=regard.spec(scale=1.0))
    with pytest.raises(AssertionError, match="OfImages is wrong: no-scale"):
        assert_attention(layer, args=image, expect=regard.spec())


def of_lengths(q: Tensor, k: Tensor, v: Tensor, *, is_top_left: bool) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    first = 0 if is_top_left else k.shape[-2] - q.shape[-2]
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(first)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("is_top_left", "causal", "verdict", "names"),
    [
        (True, True, "wrong", ["causal-top-left"]),
        (True, None, "cannot tell", []),
        (False, True, "right", []),
        (False, None, "right", []),
    ],
)
def test_an_example_with_fewer_queries_than_keys_is_tried_so(
    is_top_left: bool, causal: bool | None, verdict: str, names: list[str]
) -> None:
    args = qkv(2, 4, 2, 8)[0], *qkv(2, 4, 6, 8)[:2]
    kwargs = {"is_top_left": is_top_left}
    report = regard.check(of_lengths, args=args, kwargs=kwargs, causal=causal)
    assert (report.verdict, [f.name for f in report.faults]) == (verdict, names), report
    if verdict == "cannot tell":
        assert "pass causal=True if the last query is the newest token" in report.missing


def test_a_mask_of_keys_fits_an_example_with_fewer_queries() -> None:
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None]

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    args = qkv(2, 4, 2, 8)[0], *qkv(2, 4, 6, 8)[:2], mask
    assert regard.check(masked, args=args, means={"mask": "True keeps"}).ok


def heads_third(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def test_axes_of_heads_that_an_example_does_not_tell_are_said() -> None:
    args = qkv(2, 7, 4, 8)
    report = regard.check(heads_third, args=args)
    assert (report.verdict, report.findings) == ("right", ())
    assert "read as q (batch, tokens, 4, 8)" in str(report)
    assert regard.check(heads_third, args=args, axes="batch tokens heads dim").ok
    told = regard.check(heads_third, args=args, axes="batch heads tokens dim")
    assert [finding.name for finding in told.faults] == ["heads-and-tokens-exchanged"]


class TokensFirst(nn.Module):
    """Takes (tokens, batch, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).transpose(0, 1) for layer in (self.q, self.k, self.v))
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.full
def test_tokens_before_samples_are_different_unless_axes_declare_them() -> None:
    report = regard.check(TokensFirst, 16)
    assert report.verdict == "different"
    assert [finding.name for finding in report.differences] == ["attends-across-batch"]
    assert report.computes is not None
    assert report.computes.is_known
    assert "axes='tokens batch dim'" in report.pin
    expected = regard.spec(causal=False)
    assert regard.check(TokensFirst, 16, axes="tokens batch dim", expect=expected).ok
    told = regard.check(TokensFirst, 16, expect=expected)
    assert told.verdict == "wrong"
    assert "If it is meant so, pass axes='tokens batch dim'." in str(told)
    assert regard.check(TokensFirst, 16, axes="batch tokens dim").verdict == "wrong"


def test_axes_of_heads_are_declared_without_an_example() -> None:
    assert regard.check(heads_third).ok
    assert regard.check(heads_third, axes={"q": "batch tokens heads dim"}).ok
    told = regard.check(heads_third, axes="batch heads tokens dim")
    assert [finding.name for finding in told.faults] == ["heads-and-tokens-exchanged"]
    with pytest.raises(ValueError, match="one order of all inputs"):
        regard.check(heads_third, axes="dim tokens")


def masked_pairs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, is_finite: bool) -> Tensor:
    scores = torch.where(mask, q @ k.mT / q.shape[-1] ** 0.5, -torch.inf)
    weights = torch.softmax(scores, 2)
    return (weights.nan_to_num() if is_finite else weights) @ v


@pytest.mark.parametrize("causal", [True, None])
@pytest.mark.parametrize("queries", [5, 7])
@pytest.mark.parametrize(("is_finite", "names"), [(True, []), (False, ["nan-rows"])])
def test_a_mask_of_fewer_queries_than_keys_is_tried(
    queries: int, is_finite: bool, names: list[str], causal: bool | None
) -> None:
    mask = torch.ones(2, queries, 7, dtype=torch.bool).tril(7 - queries)
    mask[1, 2] = False
    args = *qkv(2, queries, 8)[:1], *qkv(2, 7, 8)[:2], mask
    report = regard.check(
        masked_pairs,
        args=args,
        kwargs={"is_finite": is_finite},
        means={"mask": "True keeps"},
        causal=causal,
    )
    assert [finding.name for finding in report.faults] == names, report
    assert report.verdict == ("wrong" if names else "right"), report


def test_a_mask_of_pairs_fits_a_context_of_more_tokens() -> None:
    def masked(x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        return (x @ context.mT / 4.0 + mask).softmax(-1) @ context

    mask = torch.zeros(2, 5, 7).masked_fill(torch.rand(2, 5, 7) < 0.4, -1e9)
    mask[..., 3] = 0
    args = torch.randn(2, 5, 16), torch.randn(2, 7, 16), mask
    report = regard.check(masked, args=args, means={"mask": "added to the scores"})
    assert report.faults == (), report
    assert "size of tensor" not in report.missing


class PairBias(nn.Module):
    """Takes numbers of each token, and of each pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(16, 48), nn.Linear(8, 4)

    def forward(self, tokens: Tensor, pairs: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(tokens).chunk(3, -1))
        scores = q @ k.mT / 2 + self.bias(pairs).permute(0, 3, 1, 2)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_numbers_of_pairs_of_tokens_are_no_image() -> None:
    report = regard.check(PairBias(), args=(torch.randn(2, 6, 16), torch.randn(2, 6, 6, 8)))
    assert "pairs (batch, tokens, tokens, 8)" in report.read_as
    assert report.verdict == "cannot tell"
    assert "(scores)" in str(report.computes), report
    assert all(result.outcome != "not tried" for result in report.laws), report
