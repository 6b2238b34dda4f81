"""Fused operations are read as what they did, those of other devices and packages included.

flash-attn runs on no machine without its GPU: a stand-in has its operations under its names, with
its layout and its arguments, and computes by the definition.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from models import noise
from regard.capture.fused_calls import fused_call

HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 4, 2, 5, 7, 8


def scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """By the definition, in float64; the heads of the key are grouped."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return query.double() @ key.double().mT * scale


def close(matrix: regard.AttentionMatrix, weights: Tensor) -> None:
    # 1e-6: weights of at most 1 in float32; a row without keys has weights of 0
    expected = weights.nan_to_num().float()
    torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-6, rtol=0)


# scaled_dot_product_attention, on every device


ATEN = torch.ops.aten
DEVICES = [
    pytest.param(ATEN.scaled_dot_product_attention, "attn_mask", id="whole"),
    pytest.param(ATEN._scaled_dot_product_flash_attention_for_cpu, "attn_mask", id="cpu"),
    pytest.param(ATEN._scaled_dot_product_efficient_attention, "attn_bias", id="efficient"),
    pytest.param(ATEN._scaled_dot_product_cudnn_attention, "attn_bias", id="cudnn"),
    pytest.param(
        ATEN._scaled_dot_product_fused_attention_overrideable, "attn_bias", id="other devices"
    ),
    pytest.param(ATEN._scaled_dot_product_attention_math_for_mps, "attn_mask", id="mps"),
    pytest.param(ATEN._scaled_dot_product_flash_attention, None, id="flash"),
]


def read(packet: Any, **given: Any) -> regard.AttentionMatrix:
    """What a call with these arguments did, all others as their default or empty."""
    parameters = packet.default._schema.arguments
    needed = [p.name for p in parameters if not p.has_default_value()]
    args = tuple(given.pop(name, None) for name in needed)
    call = fused_call(packet.default)
    assert call is not None
    return call.read(args, given)[0]


@pytest.mark.parametrize(("packet", "name"), DEVICES)
def test_scaled_dot_product_attention_is_read_on_every_device(packet: Any, name: str) -> None:
    query, key = noise(2, HEADS, Q_LEN, DIM), noise(2, KV_HEADS, KV_LEN, DIM)
    value = noise(2, KV_HEADS, KV_LEN, DIM)
    matrix = read(packet, query=query, key=key, value=value, is_causal=True, scale=0.3)
    future = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool).triu(1)
    close(matrix, scores(query, key, 0.3).masked_fill(future, -torch.inf).softmax(-1))
    if name is not None:
        numbers = noise(2, 1, Q_LEN, KV_LEN)
        matrix = read(packet, query=query, key=key, value=value, **{name: numbers})
        close(matrix, (scores(query, key, DIM**-0.5) + numbers.double()).softmax(-1))


# flash-attn


def flash_weights(
    query: Tensor, key: Tensor, scale: float, causal: bool, window: tuple[int, int], more: Any
) -> Tensor:
    """The weights of one sequence, heads before tokens, as flash-attn's documentation says."""
    softcap, slopes = more
    found = scores(query, key, scale)
    if softcap:
        found = softcap * torch.tanh(found / softcap)
    q_len, kv_len = found.shape[-2:]
    place = torch.arange(q_len)[:, None] + kv_len - q_len
    distance = torch.arange(kv_len) - place
    if slopes is not None:
        found = found - slopes.double()[:, None, None] * distance.abs()
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance > 0 if causal else hidden
    hidden |= distance < -left if left >= 0 else hidden
    hidden |= distance > right if right >= 0 and not causal else hidden
    return found.masked_fill(hidden, -torch.inf).softmax(-1)


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor]:
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    window = window_size_left, window_size_right
    weights = flash_weights(query, key, softmax_scale, causal, window, (softcap, alibi_slopes))
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return (weights.to(v.dtype) @ value).transpose(1, 2).contiguous(), q.new_zeros(1)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return q.clone(), q.new_zeros(1)


class Flash(nn.Module):
    """Calls flash-attn's operation as its functions do; tokens come before heads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"causal": False, "window": (-1, -1), "softcap": 0.0, "slopes": None}
        self.options |= options

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        left, right = self.options["window"]
        capped = self.options["softcap"], self.options["slopes"]
        more = self.options["causal"], left, right, *capped, False
        return torch.ops.flash_attn._flash_attn_forward(query, key, key, 0.0, 0.3, *more)[0]


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({}, "num_kv_heads=2)", id="plain"),
        pytest.param({"causal": True}, "mask=Causal())", id="causal"),
        pytest.param({"window": (2, 1)}, "mask=SlidingWindow(2, 1))", id="window"),
        pytest.param({"window": (2, -1)}, "mask=SlidingWindow(2, 12))", id="all after it"),
        pytest.param({"window": (-1, 1)}, "mask=SlidingWindow(12, 1))", id="all before it"),
        pytest.param({"window": (-1, 0)}, "mask=Causal())", id="nothing after it"),
        pytest.param(
            {"causal": True, "window": (2, 0)}, "mask=SlidingWindow(2, 0))", id="causal window"
        ),
        pytest.param({"softcap": 0.5}, "softcap=0.5)", id="softcap"),
        pytest.param(
            {"causal": True, "slopes": SLOPES}, "bias=ALiBi(4), mask=Causal())", id="alibi"
        ),
    ],
)
def test_flash_attn_is_read_with_what_it_was_given(options: dict[str, Any], says: str) -> None:
    query, key = noise(2, Q_LEN, HEADS, DIM), noise(2, KV_LEN, KV_HEADS, DIM)
    model = Flash(**options)
    with regard.observe(model) as seen:
        output = model(query, key)
    assert torch.equal(output, model(query, key))
    assert repr(seen["Flash"]).endswith(says)
    given = model.options
    more = given["softcap"], given["slopes"]
    parts = query.transpose(1, 2), key.transpose(1, 2), 0.3
    close(seen["Flash"], flash_weights(*parts, given["causal"], given["window"], more))


class Packed(nn.Module):
    """Several sequences side by side, without padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, ends: Tensor, key_ends: Tensor) -> Tensor:
        call = torch.ops.flash_attn._flash_attn_varlen_forward
        return call(query, key, key, ends, key_ends, 4, 4, 0.0, 0.3, True, **self.options)[0]


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "says"),
    [
        pytest.param([3, 1, 4], [3, 1, 4], "Documents([0, 0, 0, 1, 2, 2, 2, 2]) & ", id="texts"),
        pytest.param([1, 1, 2], [3, 1, 4], "mask=Keep((1, 4, 8)))", id="with a cache"),
    ],
)
@pytest.mark.parametrize("left", [-1, 1], ids=["causal", "window"])
def test_a_pack_of_sequences_is_read_as_documents(
    q_lens: list[int], kv_lens: list[int], says: str, left: int
) -> None:
    query, key = noise(sum(q_lens), HEADS, DIM), noise(sum(kv_lens), KV_HEADS, DIM)
    ends = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, kv_lens)]
    model = Packed(window_size_left=left)
    with regard.observe(model) as seen:
        model(query, key, *ends)
    assert says in repr(seen["Packed"])
    expected = torch.zeros(HEADS, sum(q_lens), sum(kv_lens))
    of_queries, of_keys = ([slice(*pair) for pair in pairwise(e)] for e in ends)
    for rows, columns in zip(of_queries, of_keys, strict=True):
        parts = query[rows].transpose(0, 1), key[columns].transpose(0, 1), 0.3
        weights = flash_weights(*parts, True, (left, 0), (0, None))
        expected[:, rows, columns] = weights.float()
    close(seen["Packed"], expected)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(
            lambda: Packed(block_table=torch.zeros(1, 1, dtype=torch.int32)),
            "the flash-attn call has block_table, which a matrix cannot represent.\n"
            "    Run the model without it, or with attn_implementation='sdpa'.",
            id="paged cache",
        ),
        pytest.param(
            lambda: Packed(softcap=0.5, alibi_slopes=SLOPES),
            "the flash-attn call has softcap and alibi_slopes, added after the cap.\n"
            "    Leave one of them out.",
            id="slopes after a cap",
        ),
    ],
)
def test_what_flash_attn_does_beside_is_said(model: Callable[[], nn.Module], reason: str) -> None:
    built, ends = model(), torch.tensor([0, 3], dtype=torch.int32)
    x = noise(3, HEADS, DIM)
    with pytest.raises(regard.RegardError) as caught, regard.observe(built):
        built(x, x, ends, ends)
    assert str(caught.value) == f"the attention of 'Packed' cannot be kept: {reason}"


# flex_attention


class Flex(nn.Module):
    """Calls flex_attention as it is, not compiled."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return flex_attention(query, key, key, enable_gqa=True, **self.options)


SLOPE = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def sloped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + SLOPE[h] * (kv_idx - q_idx)


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 2)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(dict, "scale=0.3536, num_kv_heads=2)", id="plain"),
        pytest.param(lambda: {"scale": 0.3}, "scale=0.3, num_kv_heads=2)", id="scale"),
        pytest.param(
            lambda: {"block_mask": create_block_mask(near, None, None, 7, 7, device="cpu")},
            "mask=SlidingWindow(2, 0))",
            id="block mask",
        ),
        pytest.param(lambda: {"score_mod": sloped}, "score_mod=", id="score_mod"),
    ],
)
def test_flex_attention_is_read_with_what_it_was_given(
    options: Callable[[], dict[str, Any]], says: str, surroundings: Callable[[], Any]
) -> None:
    query, key = noise(2, HEADS, KV_LEN, DIM), noise(2, KV_HEADS, KV_LEN, DIM)
    model = Flex(**options())
    with surroundings():
        plain = model(query, key)
        with regard.observe(model) as seen:
            output = model(query, key)
    assert torch.equal(plain, output)
    assert says in repr(seen["Flex"])
    place = torch.arange(KV_LEN)
    distance = place - place[:, None]
    expected = scores(query, key, model.options.get("scale", DIM**-0.5))
    if "score_mod" in model.options:
        expected = expected + SLOPE.double()[:, None, None] * distance
    if "block_mask" in model.options:
        expected = expected.masked_fill((distance > 0) | (distance < -2), -torch.inf)
    close(seen["Flex"], expected.softmax(-1))


# Masks


class Masked(nn.Module):
    """Attention with a mask that belongs to the model, fused or by hand."""

    def __init__(self, mask: Tensor, *, fused: bool) -> None:
        super().__init__()
        self.mask, self.fused = mask, fused

    def weights(self, x: Tensor) -> Tensor:
        return (x @ x.mT * 0.3).masked_fill(~self.mask, -torch.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask, scale=0.3)
        return self.weights(x) @ x


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by hand"])
def test_a_mask_that_numpy_changes_between_two_blocks_is_recorded_as_it_is(*, fused: bool) -> None:
    memory = torch.ones(307, 307, dtype=torch.bool).tril().numpy()
    model, x = Masked(torch.from_numpy(memory), fused=fused), noise(2, 3, 307, DIM)
    for _ in range(2):
        with torch.no_grad(), regard.observe(model) as seen:
            model(x)
        close(seen["Masked"], model.weights(x))
        memory[...] = memory.T.copy()
