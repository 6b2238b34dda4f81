"""The layers: against nn.MultiheadAttention with copied weights, and against einsum by hand."""

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.nn import (
    CrossAttention,
    LearnedPositions,
    RotaryPositions,
    SelfAttention,
    SinusoidalPositions,
    TransformerBlock,
)

# Layers of two implementations that sum in another order; everything here is below 10 in size.
CLOSE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    # Three projections, each rounded to 8 (or 11) bits, and the weights between them.
    torch.bfloat16: {"rtol": 5e-2, "atol": 2e-2},
    torch.float16: {"rtol": 5e-3, "atol": 3e-3},
}
BATCH, TOKENS, MEMORY_TOKENS, DIM = 3, 7, 11, 12

# Which keys may be attended to, written out: (q_len, kv_len) or (BATCH, 1, 1, kv_len).
Q_IDX, KV_IDX = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
BEFORE = KV_IDX <= Q_IDX
NEAR = (KV_IDX >= Q_IDX - 2) & (KV_IDX <= Q_IDX + 1)
REAL = (torch.arange(TOKENS) < torch.tensor([[7], [4], [1]]))[:, None, None]
KEPT = KV_IDX <= Q_IDX + 2
MASKS = [
    pytest.param(None, torch.tensor(True), id="no mask"),
    pytest.param(regard.Causal(), BEFORE, id="causal"),
    pytest.param(regard.SlidingWindow(2, 1), NEAR, id="window"),
    pytest.param(regard.Padding([7, 4, 1]), REAL, id="padding"),
    pytest.param(KEPT, KEPT, id="bool tensor"),
    pytest.param(
        regard.Causal() & regard.Padding([7, 4, 1]), BEFORE & REAL, id="causal and padding"
    ),
]
FORMS = [
    pytest.param({"num_heads": 1}, id="one head"),
    pytest.param({"num_heads": 3}, id="narrow heads"),
    pytest.param({"num_heads": 2, "head_dim": DIM}, id="wide heads"),
    pytest.param({"num_heads": 4, "num_kv_heads": 2}, id="grouped heads"),
    pytest.param({"num_heads": 3, "num_kv_heads": 1}, id="one key head for all"),
    pytest.param({"num_heads": 2, "head_dim": 5, "value_dim": 3}, id="narrower values"),
    pytest.param({"num_heads": 2, "head_dim": 2, "value_dim": 7}, id="wider values"),
    pytest.param({"num_heads": 2, "output_projection": False}, id="no output projection"),
    pytest.param({"num_heads": 2, "bias": False}, id="no bias"),
    pytest.param({"num_heads": 2, "positions": RotaryPositions(6)}, id="rotary positions"),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, TOKENS, DIM)


@pytest.fixture
def memory() -> Tensor:
    return torch.randn(BATCH, MEMORY_TOKENS, 5)


def by_hand(
    layer: SelfAttention | CrossAttention, x: Tensor, memory: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and weights by the textbook: key and value heads repeated, everything formed."""
    group = layer.num_heads // layer.num_kv_heads
    query = layer.query(x).unflatten(-1, (layer.num_heads, layer.head_dim))
    key = layer.key(memory).unflatten(-1, (layer.num_kv_heads, layer.head_dim))
    value = layer.value(memory).unflatten(-1, (layer.num_kv_heads, layer.value_dim))
    if isinstance(layer, SelfAttention) and layer.positions is not None:
        query = layer.positions(query.transpose(1, 2)).transpose(1, 2)
        key = layer.positions(key.transpose(1, 2)).transpose(1, 2)
    key, value = key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / layer.head_dim**0.5
    weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    output = torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(-2)
    return layer.output_projection(output) if layer.output_projection else output, weights


def copy_of(reference: nn.MultiheadAttention, layer: SelfAttention | CrossAttention) -> None:
    """Give the layer the reference's weights."""
    packed = reference.in_proj_weight
    apart = [reference.q_proj_weight, reference.k_proj_weight, reference.v_proj_weight]
    weights = apart if packed is None else packed.chunk(3)
    biases = reference.in_proj_bias.chunk(3)
    state = {
        f"{name}.weight": w for name, w in zip(("query", "key", "value"), weights, strict=True)
    }
    state |= {f"{name}.bias": b for name, b in zip(("query", "key", "value"), biases, strict=True)}
    state["output_projection.weight"] = reference.out_proj.weight
    state["output_projection.bias"] = reference.out_proj.bias
    layer.load_state_dict(state)


# Against nn.MultiheadAttention


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("mask", "kept"), MASKS)
def test_self_attention_is_nn_multihead_attention(
    x: Tensor, mask: regard.Mask | Tensor | None, kept: Tensor, dtype: torch.dtype
) -> None:
    reference = nn.MultiheadAttention(DIM, 3, batch_first=True)
    layer = SelfAttention(DIM, 3)
    copy_of(reference, layer)
    dropped = ~kept.expand(BATCH, 3, TOKENS, TOKENS).flatten(0, 1)
    output, weights = reference.to(dtype)(
        *[x.to(dtype)] * 3, attn_mask=dropped, average_attn_weights=False
    )
    layer = layer.to(dtype)
    torch.testing.assert_close(layer(x.to(dtype), mask=mask), output, **CLOSE[dtype])
    torch.testing.assert_close(
        layer.weights(x.to(dtype), mask=mask).to_dense(), weights, **CLOSE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cross_attention_is_nn_multihead_attention(
    x: Tensor, memory: Tensor, dtype: torch.dtype
) -> None:
    reference = nn.MultiheadAttention(DIM, 3, kdim=5, vdim=5, batch_first=True)
    layer = CrossAttention(DIM, 3, memory_dim=5)
    copy_of(reference, layer)
    x, memory = x.to(dtype), memory.to(dtype)
    output, weights = reference.to(dtype)(x, memory, memory, average_attn_weights=False)
    layer = layer.to(dtype)
    torch.testing.assert_close(layer(x, memory), output, **CLOSE[dtype])
    torch.testing.assert_close(layer.weights(x, memory).to_dense(), weights, **CLOSE[dtype])


def test_a_mask_of_nn_multihead_attention_is_one_to_drop(x: Tensor) -> None:
    reference = nn.MultiheadAttention(DIM, 3, batch_first=True)
    layer = SelfAttention(DIM, 3)
    copy_of(reference, layer)
    not_allowed = ~KEPT
    output, _ = reference(x, x, x, attn_mask=not_allowed)
    torch.testing.assert_close(
        layer(x, mask=regard.Drop(not_allowed)), output, **CLOSE[torch.float32]
    )


# Against the textbook, by hand


@pytest.mark.parametrize(("mask", "kept"), MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_self_attention_is_the_textbooks(
    x: Tensor, form: dict[str, object], mask: regard.Mask | Tensor | None, kept: Tensor
) -> None:
    layer = SelfAttention(DIM, **form, mask=mask)
    output, weights = by_hand(layer, x, x, kept)
    torch.testing.assert_close(layer(x), output, **CLOSE[torch.float32])
    torch.testing.assert_close(layer.weights(x).to_dense(), weights, **CLOSE[torch.float32])


@pytest.mark.parametrize("form", FORMS[:-1])
def test_every_form_of_cross_attention_is_the_textbooks(
    x: Tensor, memory: Tensor, form: dict[str, object]
) -> None:
    mask = regard.Padding([11, 5, 1])
    kept = (torch.arange(MEMORY_TOKENS) < torch.tensor([[11], [5], [1]]))[:, None, None]
    layer = CrossAttention(DIM, memory_dim=5, **form, mask=mask)
    output, weights = by_hand(layer, x, memory, kept)
    torch.testing.assert_close(layer(x, memory), output, **CLOSE[torch.float32])
    torch.testing.assert_close(layer.weights(x, memory).to_dense(), weights, **CLOSE[torch.float32])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_input_and_parameters_are_the_textbooks(
    x: Tensor, form: dict[str, object]
) -> None:
    layer = SelfAttention(DIM, **form, mask=regard.Causal()).double()
    x = x.double().requires_grad_()
    inputs = [x, *layer.parameters()]
    output, _ = by_hand(layer, x, x, BEFORE)
    expected = torch.autograd.grad(output.square().sum(), inputs)
    gradients = torch.autograd.grad(layer(x).square().sum(), inputs)
    torch.testing.assert_close(gradients, expected, **CLOSE[torch.float64])


# What weights() and forward() share


@pytest.mark.parametrize(("mask", "kept"), MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_weights_times_value_is_what_forward_gives(
    x: Tensor, form: dict[str, object], mask: regard.Mask | Tensor | None, kept: Tensor
) -> None:
    layer = SelfAttention(DIM, **form)
    value = layer.value(x).unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)
    output = (layer.weights(x, mask=mask) @ value).transpose(1, 2).flatten(-2)
    projected = layer.output_projection(output) if layer.output_projection else output
    assert torch.equal(layer(x, mask=mask), projected)


def test_weights_are_a_matrix_that_is_not_formed(x: Tensor) -> None:
    layer = SelfAttention(DIM, 4, num_kv_heads=2, mask=regard.Causal())
    assert repr(layer.weights(x)) == (
        "AttentionMatrix(batch=3, num_heads=4, q_len=7, kv_len=7, dtype=float32, device=cpu, "
        "scale=0.5774, num_kv_heads=2, mask=Causal())"
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sequence", range(BATCH))
def test_one_sequence_alone_gives_what_it_gives_in_a_batch(
    x: Tensor, form: dict[str, object], sequence: int
) -> None:
    layer = SelfAttention(DIM, **form, mask=regard.Causal())
    close = CLOSE[torch.float32]
    torch.testing.assert_close(layer(x[sequence]), layer(x)[sequence], **close)
    alone, in_batch = layer.weights(x[sequence]), layer.weights(x)[sequence]
    assert alone.shape == (layer.num_heads, TOKENS, TOKENS)
    torch.testing.assert_close(alone.to_dense(), in_batch.to_dense(), **close)


def test_cross_attention_works_without_a_batch(x: Tensor, memory: Tensor) -> None:
    layer = CrossAttention(DIM, 3, memory_dim=5)
    torch.testing.assert_close(layer(x[1], memory[1]), layer(x, memory)[1], **CLOSE[torch.float32])
    assert layer.weights(x[1], memory[1]).shape == (3, TOKENS, MEMORY_TOKENS)


def test_padding_of_one_sequence_counts_its_tokens_and_not_its_heads(x: Tensor) -> None:
    """Three heads, one length: the first axis of a layer's masks is the batch."""
    layer = SelfAttention(DIM, 3)
    A = layer.weights(x[0], mask=regard.Padding([4]))
    torch.testing.assert_close(A[:, :, :4].sum(-1), torch.ones(3, TOKENS))


# Masks


def test_the_layers_mask_and_the_calls_mask_must_both_allow(x: Tensor) -> None:
    layer = SelfAttention(DIM, 2, mask=regard.Causal())
    both = SelfAttention(DIM, 2)
    both.load_state_dict(layer.state_dict())
    padding = regard.Padding([7, 4, 1])
    assert torch.equal(layer(x, mask=padding), both(x, mask=regard.Causal() & padding))
    assert torch.equal(layer(x, mask=KEPT), both(x, mask=regard.Causal() & KEPT))


def test_cross_attention_takes_a_mask_for_one_call(x: Tensor, memory: Tensor) -> None:
    padding = regard.Padding([11, 5, 1])
    always = CrossAttention(DIM, 2, memory_dim=5, mask=padding)
    layer = CrossAttention(DIM, 2, memory_dim=5)
    layer.load_state_dict(always.state_dict())
    assert torch.equal(layer(x, memory, mask=padding), always(x, memory))
    assert not torch.equal(layer(x, memory), always(x, memory))


def test_what_comes_later_cannot_move_a_causal_output(x: Tensor) -> None:
    layer = SelfAttention(DIM, 2, mask=regard.Causal(), positions=RotaryPositions(6))
    changed = torch.cat((x[:, :4], torch.randn(BATCH, 3, DIM)), dim=1)
    assert torch.equal(layer(changed)[:, :4], layer(x)[:, :4])
    assert not torch.equal(layer(changed)[:, 4:], layer(x)[:, 4:])


def test_a_token_with_nothing_to_attend_to_takes_zeros(x: Tensor) -> None:
    layer = SelfAttention(DIM, 2, output_projection=False)
    x.requires_grad_()
    output = layer(x, mask=regard.Padding([0, 7, 7]))
    output.sum().backward()
    assert torch.equal(output[0], torch.zeros(TOKENS, DIM))
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_the_layers_own_tensor_mask_goes_where_the_layer_goes() -> None:
    """The meta device stands for any other one: it mixes with the CPU as little as a GPU does."""
    layer = SelfAttention(DIM, 2, mask=KEPT).to("meta")
    A = layer.weights(torch.empty(BATCH, TOKENS, DIM, device="meta"))
    assert isinstance(A.mask, regard.Keep)
    assert A.mask.mask.device.type == "meta"


# As a module of PyTorch


def test_a_seed_gives_the_numbers_of_linear_layers_made_by_hand() -> None:
    layer = SelfAttention(DIM, 3)
    torch.manual_seed(0)
    by_hand = [nn.Linear(DIM, DIM) for _ in range(4)]
    layers = [layer.query, layer.key, layer.value, layer.output_projection]
    assert [torch.equal(a.weight, b.weight) for a, b in zip(layers, by_hand, strict=True)] == [
        True
    ] * 4


def test_the_state_dict_has_the_projections_and_nothing_else() -> None:
    block = SelfAttention(DIM, 2, mask=KEPT, positions=RotaryPositions(6))
    names = ("query", "key", "value", "output_projection")
    assert list(block.state_dict()) == [f"{n}.{p}" for n in names for p in ("weight", "bias")]


@pytest.mark.parametrize(
    "layer",
    [SelfAttention(8, bias=False), CrossAttention(8, bias=False)],
    ids=["self-attention", "cross-attention"],
)
def test_without_bias_no_projection_has_one(layer: SelfAttention | CrossAttention) -> None:
    names = ("query", "key", "value", "output_projection")
    assert list(layer.state_dict()) == [f"{n}.weight" for n in names]


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        pytest.param(SelfAttention(8, 2), "num_heads=2, head_dim=4", id="plain"),
        pytest.param(
            SelfAttention(8, 4, num_kv_heads=2, value_dim=3, mask=regard.Causal()),
            "num_heads=4, head_dim=2, num_kv_heads=2, value_dim=3, mask=Causal()",
            id="everything",
        ),
        pytest.param(CrossAttention(8, memory_dim=5), "num_heads=1, head_dim=8", id="cross"),
        pytest.param(RotaryPositions(8), "8, base=10000", id="rotary"),
        pytest.param(SinusoidalPositions(8, base=500.0), "8, base=500", id="sinusoidal"),
        pytest.param(LearnedPositions(8, 512), "8, max_len=512", id="learned"),
    ],
)
def test_a_layer_prints_its_arguments(layer: nn.Module, text: str) -> None:
    assert layer.extra_repr() == text


# torch.compile looks at the .grad of what passes between two of its graphs; PyTorch's own noise.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.full
@pytest.mark.parametrize("shape", [(2, 7, 16), (7, 16)], ids=["batch", "no batch"])
def test_a_compiled_block_gives_what_the_block_gives(shape: tuple[int, ...]) -> None:
    block = TransformerBlock(
        16, 4, num_kv_heads=2, mask=regard.Causal(), positions=RotaryPositions(4)
    )
    torch.compiler.reset()
    compiled = torch.compile(block, backend="eager")
    x = torch.randn(shape)
    torch.testing.assert_close(compiled(x), block(x))


def test_autocast_attends_in_half_precision(x: Tensor) -> None:
    layer = SelfAttention(DIM, 2, positions=RotaryPositions(6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.weights(x).dtype == torch.bfloat16
        torch.testing.assert_close(
            layer(x).float(), layer.bfloat16()(x.bfloat16()).float(), **CLOSE[torch.bfloat16]
        )


# The transformer block


@pytest.mark.parametrize(("mask", "kept"), MASKS)
def test_a_block_adds_attention_and_then_the_mlp_to_its_input(
    x: Tensor, mask: regard.Mask | Tensor | None, kept: Tensor
) -> None:
    block = TransformerBlock(DIM, 2)
    after = x + block.attention(block.attention_norm(x), mask=mask)
    assert torch.equal(block(x, mask=mask), after + block.mlp(block.mlp_norm(after)))


def test_a_block_whose_last_layers_are_zero_is_the_identity(x: Tensor) -> None:
    block = TransformerBlock(DIM, 2, mask=regard.Causal())
    nn.init.zeros_(block.attention.output_projection.weight)
    nn.init.zeros_(block.attention.output_projection.bias)
    nn.init.zeros_(block.mlp[-1].weight)
    nn.init.zeros_(block.mlp[-1].bias)
    assert torch.equal(block(x), x)


def test_a_block_is_pytorchs_encoder_layer_with_norms_first(x: Tensor) -> None:
    reference = nn.TransformerEncoderLayer(
        DIM, 2, 20, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    block = TransformerBlock(DIM, 2, mlp_dim=20)
    copy_of(reference.self_attn, block.attention)
    block.mlp[0], block.mlp[-1] = reference.linear1, reference.linear2
    torch.testing.assert_close(block(x), reference(x), **CLOSE[torch.float32])


def test_a_block_hands_its_arguments_to_its_attention() -> None:
    rotary = RotaryPositions(4)
    block = TransformerBlock(16, 4, num_kv_heads=2, mask=regard.Causal(), positions=rotary)
    assert block.attention.extra_repr() == "num_heads=4, head_dim=4, num_kv_heads=2, mask=Causal()"
    assert block.attention.positions is rotary


def test_an_mlp_is_four_times_as_wide_as_its_block() -> None:
    block = TransformerBlock(16, 4)
    assert repr(block.mlp[0]) == "Linear(in_features=16, out_features=64, bias=True)"


def test_the_weights_of_a_block_are_those_of_its_attention(x: Tensor) -> None:
    block = TransformerBlock(DIM, 2, mask=regard.Causal())
    expected = block.attention.weights(block.attention_norm(x), mask=KEPT)
    assert torch.equal(block.weights(x, mask=KEPT).to_dense(), expected.to_dense())
