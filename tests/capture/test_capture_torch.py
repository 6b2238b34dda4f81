"""PyTorch's own attention layers, on their fast path and off it."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
import regard.capture.observer
from models import noise
from regard.capture.fused_calls import batching

DIM, HEADS, TOKENS = 16, 4, 7
SURROUNDINGS = {
    "with gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
FUTURE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
# PyTorch says of nested tensors that they are a prototype, of masks that they should be bool.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


@pytest.fixture(params=SURROUNDINGS.values(), ids=SURROUNDINGS)
def surroundings(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return request.param


def x(tokens: int = TOKENS) -> Tensor:
    return noise(2, tokens, DIM)


# nn.MultiheadAttention


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(DIM, HEADS, **options).eval()


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "tokens first"])
@pytest.mark.parametrize(
    ("masks", "says"),
    [
        pytest.param({}, ")", id="no mask"),
        pytest.param({"key_padding_mask": PADDING}, "mask=Padding([7, 4]))", id="padding"),
        pytest.param({"attn_mask": FUTURE}, "mask=Causal())", id="causal"),
        pytest.param(
            {"attn_mask": FUTURE, "key_padding_mask": PADDING},
            "mask=Causal() & Padding([7, 4]))",
            id="both",
        ),
        pytest.param(
            {"attn_mask": torch.zeros(TOKENS, TOKENS).masked_fill(FUTURE, -torch.inf)},
            "mask=Causal())",
            id="causal in numbers",
        ),
        pytest.param({"attn_mask": noise(TOKENS, TOKENS)}, "bias=(1, 1, 7, 7))", id="numbers"),
    ],
)
def test_multihead_attention_is_untouched_and_seen(
    masks: dict[str, Tensor],
    says: str,
    batch_first: bool,
    need_weights: bool,
    surroundings: Callable[[], Any],
) -> None:
    layer = attention(batch_first=batch_first)
    given = x() if batch_first else x().transpose(0, 1)
    options = {**masks, "need_weights": need_weights, "average_attn_weights": False}
    with surroundings():
        plain = layer(given, given, given, **options)
        with regard.observe(layer) as seen:
            output = layer(given, given, given, **options)
        _, weights = layer(given, given, given, **{**options, "need_weights": True})
    assert torch.equal(plain[0], output[0])
    assert list(seen) == ["MultiheadAttention"]
    assert repr(seen[0]).endswith(says)
    # 1e-6: weights of at most 1 in float32
    torch.testing.assert_close(seen[0].to_dense(), weights, atol=1e-6, rtol=0)


def test_cross_attention_of_other_widths_is_seen(surroundings: Callable[[], Any]) -> None:
    layer = attention(kdim=5, vdim=5, batch_first=True)
    context = noise(2, 3, 5)
    with surroundings():
        plain = layer(x(), context, context, average_attn_weights=False)
        with regard.observe(layer) as seen:
            output = layer(x(), context, context, average_attn_weights=False)
    assert torch.equal(plain[0], output[0])
    assert seen[0].shape == (2, HEADS, TOKENS, 3)
    torch.testing.assert_close(seen[0].to_dense(), output[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("added", ["add_zero_attn", "add_bias_kv"])
def test_keys_that_the_layer_adds_are_keys(added: str, need_weights: bool) -> None:
    layer = attention(batch_first=True, **{added: True})
    options = {"key_padding_mask": PADDING, "average_attn_weights": False}
    with torch.no_grad(), regard.observe(layer) as seen:
        layer(x(), x(), x(), **options, need_weights=need_weights)
    expected = layer(x(), x(), x(), **options)[1]
    torch.testing.assert_close(seen[0].to_dense(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "masks",
    [
        pytest.param({}, id="no mask"),
        pytest.param({"attn_mask": FUTURE}, id="causal"),
        pytest.param({"key_padding_mask": PADDING[1]}, id="padding"),
        pytest.param({"attn_mask": FUTURE.expand(HEADS, -1, -1)}, id="a mask for each head"),
    ],
)
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_without_a_batch_there_is_none_or_one_of_1(
    masks: dict[str, Tensor], need_weights: bool, surroundings: Callable[[], Any]
) -> None:
    layer, given = attention(), noise(TOKENS, DIM)
    with surroundings(), regard.observe(layer) as seen:
        layer(given, given, given, need_weights=need_weights, **masks)
    expected = layer(given, given, given, average_attn_weights=False, **masks)[1]
    leading = () if need_weights else (1,)  # the fused call has a batch of its own
    assert seen[0].shape == (*leading, HEADS, TOKENS, TOKENS)
    dense = seen[0].to_dense().reshape(expected.shape)
    torch.testing.assert_close(dense, expected, atol=1e-6, rtol=0)


# nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer


def weights_of(layer: nn.Module, given: Tensor, **masks: Tensor | None) -> Tensor:
    """What the attention of an encoder layer does with its input, by nn.MultiheadAttention."""
    given = layer.norm1(given) if layer.norm_first else given
    with torch.enable_grad():  # off the fast path
        return layer.self_attn(given, given, given, average_attn_weights=False, **masks)[1]


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize(
    ("mask", "padding", "nested"),
    [
        pytest.param(None, None, True, id="no mask"),
        pytest.param(None, PADDING, True, id="padding, nested"),
        pytest.param(None, PADDING, False, id="padding"),
        pytest.param(FUTURE, None, False, id="causal"),
        pytest.param(FUTURE, PADDING, False, id="both"),
    ],
)
def test_an_encoder_is_untouched_and_seen(
    mask: Tensor | None,
    padding: Tensor | None,
    nested: bool,
    norm_first: bool,
    surroundings: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 19, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    with surroundings():
        plain = encoder(x(), mask=mask, src_key_padding_mask=padding)
        with regard.observe(encoder) as seen:
            output = encoder(x(), mask=mask, src_key_padding_mask=padding)
    assert torch.equal(plain, output)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    given = x()
    real = torch.ones(2, TOKENS) if padding is None else ~padding
    for layer, matrix in zip(encoder.layers, seen.values(), strict=True):
        expected = weights_of(layer, given, attn_mask=mask, key_padding_mask=padding)
        # Of padding in a nested tensor nothing is computed; elsewhere it means nothing.
        rows = real[:, None, :, None]
        torch.testing.assert_close(matrix.to_dense() * rows, expected * rows, atol=1e-6, rtol=0)
        given = layer(given, src_mask=mask, src_key_padding_mask=padding)


def test_padding_that_no_sequence_needs_is_there_too() -> None:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 19, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 5 + [True] * 2, [False] * 4 + [True] * 3])
    with torch.no_grad(), regard.observe(encoder) as seen:
        encoder(x(), src_key_padding_mask=padding)
    assert seen[0].shape == seen[1].shape == (2, HEADS, TOKENS, TOKENS)
    assert torch.equal(seen[0].to_dense().sum(-1) > 0.5, ~padding[:, None].expand(-1, HEADS, -1))


def test_a_layer_by_itself_has_the_name_of_its_attention() -> None:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 19, batch_first=True).eval()
    with torch.no_grad(), regard.observe(layer) as fast:
        layer(x())
    with regard.observe(layer) as slow:
        layer(x())
    assert list(fast) == list(slow) == ["self_attn"]


def test_a_transformer_has_its_decoder_and_cross_attention(
    surroundings: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(DIM, HEADS, 1, 1, 19, batch_first=True).eval()
    target = noise(2, 5, DIM)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5),
        "tgt_is_causal": True,
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
    }
    with surroundings():
        plain = model(x(), target, **masks)
        with regard.observe(model) as seen:
            output = model(x(), target, **masks)
    assert torch.equal(plain, output)
    assert list(seen) == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    assert repr(seen[1]).endswith("mask=Causal())")
    assert repr(seen[2]).endswith("mask=Padding([7, 4]))")
    layer = model.decoder.layers[0]
    expected = layer.self_attn(target, target, target, attn_mask=masks["tgt_mask"])[1]
    torch.testing.assert_close(seen[1].to_dense().mean(1), expected, atol=1e-6, rtol=0)
    memory = model.encoder(x(), src_key_padding_mask=PADDING)
    query = layer.norm1(target + layer._sa_block(target, masks["tgt_mask"], None))
    expected = layer.multihead_attn(query, memory, memory, key_padding_mask=PADDING)[1]
    torch.testing.assert_close(seen[2].to_dense().mean(1), expected, atol=1e-6, rtol=0)


# Calls without a batch


def batched(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Add a batch of 1 inside of one call, as PyTorch 2.15 does."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)).squeeze(0)


class Batching(nn.Module):
    """Attention whose kernel, or whose own code, adds a batch of 1."""

    def __init__(self, *, is_own: bool) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and runs in one call
            self.attend = batched if is_own else torch.jit.script(batched)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x.sin(), x.cos(), x)


@pytest.mark.parametrize("is_own", [False, True], ids=["of the kernel", "of the model"])
@pytest.mark.parametrize("keep", ["qk", "qkv"])
def test_a_batch_is_recorded_where_the_model_has_it_and_not_where_the_kernel_adds_it(
    is_own: bool, keep: Any, surroundings: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = torch.ops.aten.unsqueeze.default
    monkeypatch.setattr(regard.capture.observer, "batching", lambda: operation)
    model, x = Batching(is_own=is_own), noise(HEADS, TOKENS, DIM).requires_grad_()
    with surroundings():
        expected = model(x)
        with regard.observe(model, keep=keep) as seen:
            assert torch.equal(model(x), expected)
    leading = (1,) if is_own else ()
    assert seen[0].shape == (*leading, HEADS, TOKENS, TOKENS)
    torch.testing.assert_close((seen[0] @ x).reshape(x.shape), expected)
    if keep == "qkv":
        assert torch.equal(seen.value(0), x[(None,) * len(leading)])


def test_the_operation_that_adds_a_batch_is_found_by_a_probe(
    surroundings: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = batching.__wrapped__  # without its cache
    adding = Batching(is_own=False).attend
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", adding)
    with surroundings():
        assert probe() is torch.ops.aten.unsqueeze.default
