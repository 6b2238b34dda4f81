"""observe(model, keep="qkv"): the value of each attention, so that matrix @ value is its output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

import regard
import regard.nn
from architectures import ARCHITECTURES
from recording_files import changed
from regard.errors import RegardError
from tiny_models import SIZES

SMALL = {**SIZES, "vocab_size": 100}


def llama(kind: str = "sdpa") -> LlamaForCausalLM:
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, eos_token_id=None))
    model.set_attn_implementation(kind)
    return model.eval()


def bert(kind: str) -> BertModel:
    set_seed(0)
    model = BertModel(BertConfig(**SMALL))
    model.set_attn_implementation(kind)
    return model.eval()


def t5() -> T5ForConditionalGeneration:
    set_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=100, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


def padded() -> dict[str, Tensor]:
    ids = torch.arange(1, 15).view(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def two_texts() -> dict[str, Tensor]:
    return {**padded(), "decoder_input_ids": torch.arange(1, 7).view(2, 3)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    "llama, grouped, sdpa": (lambda: llama("sdpa"), padded, "o_proj"),
    "llama, grouped, eager": (lambda: llama("eager"), padded, "o_proj"),
    "bert, sdpa": (lambda: bert("sdpa"), padded, "output.dense"),
    "bert, eager": (lambda: bert("eager"), padded, "output.dense"),
    "gpt-oss, sinks": (lambda: ARCHITECTURES["gpt-oss"].build("eager"), padded, "o_proj"),
    "t5": (t5, two_texts, "o"),
}


def outputs_of(model: nn.Module, suffix: str, run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """What the model gave, and what went into each layer's last projection: the heads side by side.

    It is the output of the attention itself, of every call.
    """
    outputs: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: outputs.append(given[0].clone()))
        for name, module in model.named_modules()
        if name.endswith(f".{suffix}") and ("ttention" in name or "attn" in name)
    ]
    output = run()
    for hook in hooks:
        hook.remove()
    return output, outputs


def side_by_side(output: Tensor) -> Tensor:
    """(batch, num_heads, tokens, head_dim) as (batch, tokens, num_heads · head_dim)."""
    return output.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("build", "given", "suffix"),
    [pytest.param(*model, id=name) for name, model in MODELS.items()],
)
@torch.no_grad()
def test_weights_times_values_are_the_output_of_the_models_own_attention(
    build: Callable[[], nn.Module], given: Callable[[], dict[str, Tensor]], suffix: str
) -> None:
    model = build()
    _, outputs = outputs_of(model, suffix, lambda: model(**given()))
    with regard.observe(model, keep="qkv") as seen:
        model(**given())
    real = padded()["attention_mask"].bool()
    assert len(outputs) == len(seen) >= 2
    for name, output in zip(seen, outputs, strict=True):
        found = side_by_side(seen[name] @ seen.value(name))
        if output.shape[1] == real.shape[1]:
            output, found = output[real], found[real]  # padding attends to what it likes
        torch.testing.assert_close(found, output, atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(7)
@torch.no_grad()
@pytest.mark.parametrize(
    "name", [name for name, one in ARCHITECTURES.items() if {"sdpa", "eager"} <= {*one.kinds}]
)
def test_values_found_by_hand_are_those_that_the_fused_call_was_given(name: str) -> None:
    found: list[regard.Recording] = []
    for kind in ("sdpa", "eager"):
        model = ARCHITECTURES[name].build(kind)
        with regard.observe(model, keep="qkv") as seen:
            model(**ARCHITECTURES[name].inputs)
        found.append(seen)
    fused, by_hand = found
    assert list(fused) == list(by_hand)
    real = slice(0, 1)  # the first entry has no padding, which attends to what it likes
    for layer in fused:
        value = by_hand.value(layer)[real]
        torch.testing.assert_close(value, fused.value(layer)[real], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_value_is_the_very_tensor_that_the_call_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Tensor] = []
    real = nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        given.append(value.clone())
        return real(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    model = llama()
    with regard.observe(model, keep="qkv") as seen:
        model(**padded())
    for place, value in enumerate(given):
        assert torch.equal(seen.value(place), value if value.shape[1] == 2 else value[:, ::2])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_values_are_joined_over_a_generation_as_keys_are(kind: str) -> None:
    model, ids = llama(kind), torch.arange(1, 6)[None]
    options = {"do_sample": False, "return_dict_in_generate": True}
    with regard.observe(model, keep="qkv") as seen:
        written = model.generate(ids, max_new_tokens=4, **options)
    assert len(seen) == 2
    for place, layer in enumerate(written.past_key_values.layers):
        assert torch.equal(seen[place].source.key, layer.keys)
        assert torch.equal(seen.value(place), layer.values)


def multi_head(*, fast: bool) -> tuple[nn.MultiheadAttention, Tensor]:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    nn.init.normal_(layer.in_proj_bias)
    return layer.train(not fast), torch.randn(3, 5, 6)


@torch.no_grad()
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast path", "slow path"])
@pytest.mark.parametrize("batch", [True, False], ids=["batch", "no batch"])
def test_the_values_of_multihead_attention_give_its_output(
    fast: bool, need_weights: bool, batch: bool
) -> None:
    layer, x = multi_head(fast=fast)
    x = x if batch else x[0]
    with regard.observe(layer, keep="qkv") as seen:
        expected, _ = layer(x, x, x, need_weights=need_weights)
    heads = (seen[0] @ seen.value(0)).transpose(-3, -2).flatten(-2)
    found = layer.out_proj(heads).reshape(expected.shape)  # without a batch it is one of 1
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_values_of_the_encoders_fast_path_are_those_of_the_slow_one(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 7, batch_first=True, norm_first=norm_first).eval()
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=not norm_first)
    x, padding = torch.randn(2, 5, 6), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with regard.observe(encoder, keep="qkv") as fast:
        encoder(x, src_key_padding_mask=padding)
    with torch.enable_grad(), regard.observe(encoder.train(), keep="qkv") as slow:
        encoder(x, src_key_padding_mask=padding)
    found, expected = (seen.value(0).transpose(1, 2)[~padding] for seen in (fast, slow))
    torch.testing.assert_close(found, expected)


class ValueLast(nn.Module):
    """As lectures write it: the value is projected after the softmax, and two heads take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = (self.query(x) @ self.key(x).mT).softmax(-1)
        second = (self.key(x) @ self.query(x).mT).softmax(-1)
        value = self.value(x)
        return second @ (2 * value) + first @ value


@torch.no_grad()
def test_each_of_several_weights_finds_its_own_value_after_other_products() -> None:
    torch.manual_seed(0)
    model, x = ValueLast(), torch.randn(5, 6)
    with regard.observe(model, keep="qkv") as seen:
        model(x)
    assert torch.equal(seen.value(0), 2 * model.value(x))  # in the order of the values
    assert torch.equal(seen.value(1), model.value(x))


class TwoValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(-1)
        return weights @ x + (weights @ x.sin()).tanh()


@torch.no_grad()
def test_weights_that_meet_two_values_are_recorded_with_each_of_them() -> None:
    x = torch.randn(2, 3, 5, 6)
    with regard.observe(model := TwoValues(), keep="qkv", strict=True) as seen:
        model(x)
    assert list(seen) == ["TwoValues", "TwoValues#2"]
    assert torch.equal(seen[0].to_dense(), seen[1].to_dense())
    assert torch.equal(seen.value(0), x)
    assert torch.equal(seen.value(1), x.sin())
    with regard.observe(model) as seen:
        model(x)
    assert list(seen) == ["TwoValues"]


@torch.no_grad()
def test_keys_that_no_query_attends_to_keep_their_value() -> None:
    class First(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    query, key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    with regard.observe(model := First(), keep="qkv") as seen:
        output = model(query, key, value)
    assert torch.equal(seen.value(0), value)
    torch.testing.assert_close(seen[0] @ seen.value(0), output)


@torch.no_grad()
def test_regards_own_product_tells_its_value() -> None:
    layer = regard.nn.SelfAttention(6, num_heads=3)
    with regard.observe(layer, keep="qkv") as seen:
        layer(torch.randn(2, 5, 6))
    assert seen.value(0).shape == (2, 3, 5, 2)


@torch.no_grad()
def test_values_that_were_not_kept_are_an_error_that_says_how_to_keep_them() -> None:
    model = llama()
    with regard.observe(model) as seen:
        model(**padded())
    with pytest.raises(RegardError) as error:
        seen.value(0)
    assert str(error.value) == (
        "layer 'model.layers.0.self_attn' has no value; it was not kept.\n"
        '    Observe the model again with keep="qkv".'
    )


@torch.no_grad()
@pytest.mark.parametrize("heads", [[3], [0, 2], slice(0, 2), [1, 0, 3]], ids=str)
def test_chosen_heads_keep_their_own_values(heads: Any) -> None:
    model = llama()
    _, outputs = outputs_of(model, "o_proj", lambda: model(**padded()))
    with regard.observe(model, heads=heads, keep="qkv") as seen:
        model(**padded())
    found = seen[0][0] @ seen.value(0)[0]
    expected = outputs[0][0].unflatten(-1, (4, 8)).transpose(0, 1)[heads]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("queries", [slice(-2, None), slice(1, 3)], ids=str)
def test_of_some_queries_all_values_are_kept(queries: slice) -> None:
    model, ids = llama(), torch.arange(1, 6)[None]
    with regard.observe(model, keep="qkv") as whole:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    with regard.observe(model, queries=queries, keep="qkv") as some:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(some.value(1), whole.value(1))
    torch.testing.assert_close(some[1] @ some.value(1), (whole[1] @ whole.value(1))[:, :, queries])


@torch.no_grad()
def test_an_entry_of_the_batch_has_its_own_value() -> None:
    model = llama()
    with regard.observe(model, keep="qkv") as seen:
        model(**padded())
    assert torch.equal(seen.entry(1).value(0), seen.value(0)[1:])


@torch.no_grad()
@pytest.mark.parametrize("kept", ["saved", "written as the model runs"])
def test_a_file_has_the_values_exactly(tmp_path: Path, kept: str) -> None:
    model, ids, path = llama(), torch.arange(1, 6)[None], tmp_path / "run.safetensors"
    with regard.observe(model, keep="qkv") as expected:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    if kept == "saved":
        expected.save(path)
    else:
        with regard.observe(model, keep="qkv", path=path) as seen:
            model.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(seen.value(0), expected.value(0))
    loaded = regard.load(path)
    assert all(torch.equal(loaded.value(name), expected.value(name)) for name in expected)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    x, path = torch.randn(1, 5, 6), tmp_path / "run.safetensors"
    with torch.no_grad(), regard.observe(layer, keep="qkv", path=path):
        layer(x, x, x)
    return path


def test_a_value_of_another_length_is_damage(file: Path) -> None:
    def cut(layer: dict[str, Any]) -> None:
        layer["shape"] = [1, 2, 5, 4]
        layer["matrix"] = None

    with pytest.raises(
        RegardError, match=r"a value of shape \(1, 2, 5, 3\) for one of \(1, 2, 5, 4\)"
    ):
        regard.load(changed(file, lambda about: cut(about["layers"][0])))


@torch.no_grad()
def test_reductions_keep_no_values() -> None:
    model = llama()
    with regard.observe(model, keep=[regard.Entropy()]) as seen:
        model(**padded())
    assert seen.layers[0].value is None
