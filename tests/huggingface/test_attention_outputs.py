"""attn_implementation="regard": lazy matrices where eager attention returns its weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import regard
import regard.transformers
from architectures import ARCHITECTURES, Architecture, text
from models import ids

# T5 has one in newer versions of transformers alone.
WITHOUT_INTERFACE = {
    "BLOOM",
    "Falcon",
    *(["T5"] if "sdpa" not in ARCHITECTURES["T5"].kinds else []),
}
HERE = {name: each for name, each in ARCHITECTURES.items() if name not in WITHOUT_INTERFACE}


def outputs(model: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[str, object]:
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


@pytest.mark.parametrize("architecture", HERE.values(), ids=HERE)
def test_the_matrices_are_the_weights_of_eager_attention(architecture: Architecture) -> None:
    kind = "sdpa" if "sdpa" in architecture.kinds else "eager"
    model = architecture.build(kind)
    model.set_attn_implementation("regard")
    found = outputs(model, architecture.inputs)
    expected = outputs(architecture.build("eager"), architecture.inputs)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    fields = [field for field in expected if "attentions" in field and expected[field]]
    for field in fields:
        for matrix, weights in zip(found[field], expected[field], strict=True):
            assert isinstance(matrix, regard.AttentionMatrix)
            torch.testing.assert_close(matrix.to_dense(), weights, atol=1e-5, rtol=0)
    assert fields or "CLIP" in type(model).__name__ or "Siglip" in type(model).__name__


@pytest.mark.parametrize("name", ["Llama", "BERT", "Qwen 3"])
def test_the_output_has_the_bits_of_sdpa(name: str) -> None:
    model = ARCHITECTURES[name].build("sdpa")
    with torch.no_grad():
        expected = model(**ARCHITECTURES[name].inputs)[0]
        model.set_attn_implementation("regard")
        assert torch.equal(model(**ARCHITECTURES[name].inputs)[0], expected)


@pytest.mark.parametrize("kind", ["regard", "sdpa"])
def test_a_model_with_an_attention_of_its_own_is_refused(kind: str) -> None:
    architecture = ARCHITECTURES["BLOOM"]
    model = architecture.build("regard" if kind == "regard" else "eager")
    if kind == "regard":
        try:  # older versions of transformers make the mask themselves
            found = model(**architecture.inputs)[0]
        except regard.RegardError as error:
            assert str(error).startswith("bloom has an attention of its own")  # noqa: PT017
        else:
            assert torch.equal(found, architecture.build("eager")(**architecture.inputs)[0])
    else:  # transformers itself warns, and changes nothing
        model.set_attn_implementation("regard")
        assert isinstance(outputs(model, architecture.inputs)["attentions"][0], Tensor)


def llama(kind: str = "regard", **options: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}
    config = LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=37, **options)
    config._attn_implementation = kind
    return LlamaForCausalLM(config).eval()


def mistral(kind: str) -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}
    config = MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=37, sliding_window=3)
    config._attn_implementation = kind
    return MistralForCausalLM(config).eval()


def test_gradients_are_those_of_eager_attention() -> None:
    gradients: list[Tensor] = []
    for kind in ("regard", "eager"):
        model = llama(kind)
        *_, last = model(**text(), output_attentions=True).attentions
        entropy = (
            last.entropy()
            if isinstance(last, regard.AttentionMatrix)
            else -(last.clamp_min(1e-30).log() * last).sum(-1)
        )
        entropy.mean().backward()
        weight = model.model.layers[0].self_attn.k_proj.weight.grad
        assert weight is not None
        gradients.append(weight)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_generated_tokens_have_their_rows() -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_attentions": True, "eos_token_id": None, "pad_token_id": 0}
    found = llama().generate(ids(), **options)
    expected = llama("eager").generate(ids(), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for step, weights in zip(found.attentions, expected.attentions, strict=True):
        for matrix, each in zip(step, weights, strict=True):
            torch.testing.assert_close(matrix.to_dense(), each, atol=1e-6, rtol=0)


def test_packed_texts_do_not_see_each_other() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    inputs = {"input_ids": ids()[:1], "position_ids": positions, "use_cache": False}
    [first, _] = outputs(llama(), inputs)["attentions"]
    [weights, _] = outputs(llama("eager"), inputs)["attentions"]
    assert weights[0, 0, 5, 0] == 0
    torch.testing.assert_close(first.to_dense(), weights, atol=1e-6, rtol=0)


def test_a_static_cache_has_columns_that_nobody_sees() -> None:
    options = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": "static"}
    options |= {"return_dict_in_generate": True, "output_attentions": True, "pad_token_id": 0}
    found = llama().generate(ids(), **options, disable_compile=True)
    expected = llama("eager").generate(ids(), **options, disable_compile=True)
    for step, weights in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(step[0].to_dense(), weights[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
def test_a_static_cache_that_is_overwritten_changes_no_matrix(mode: Callable[[], Any]) -> None:
    def attentions(kind: str) -> list[Tensor]:
        model, found = mistral(kind), []
        with mode():
            cache = StaticCache(model.config, max_cache_len=9)
            for tokens in (ids(), ids()[:, :1], ids()[:, 1:2]):  # the window of 3 keys moves on
                found += model(tokens, past_key_values=cache, output_attentions=True).attentions
            cache.reset()
            return [each if isinstance(each, Tensor) else each.to_dense() for each in found]

    torch.testing.assert_close(attentions("regard"), attentions("eager"), atol=1e-6, rtol=0)


def test_dropout_with_sinks_is_refused() -> None:
    architecture = ARCHITECTURES["gpt-oss"]
    model = architecture.build("eager").train()
    model.set_attn_implementation("regard")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(regard.RegardError, match="has dropout on weights with a softcap or sinks"):
        model(**architecture.inputs)


def test_long_texts_need_no_matrix() -> None:
    model, tokens = llama(max_position_embeddings=32768), torch.zeros(1, 17000, dtype=torch.int64)
    with torch.no_grad():
        [first, _] = model.model(tokens, output_attentions=True).attentions
        assert first.shape == (1, 4, 17000, 17000)
        assert first[..., -1, :].shape == (1, 4, 17000)
        with pytest.raises(MemoryError, match="GiB"):
            first.to_dense()


# What scripts do with weights


def even(heads: int = 3) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 5, 4, generator=generator) for _ in range(2))
    return regard.attend(query, key, mask=regard.Causal())


IDIOMS: dict[str, Callable[[regard.AttentionMatrix | Tensor], Tensor]] = {
    "the mean of the heads": lambda a: a.mean(1)[0, 2],
    "the mean of the heads of one text": lambda a: a[0].mean(0)[2:4, 1:],
    "the last row of the mean": lambda a: a.mean(dim=1)[:, -1, :],
    "a part of the mean, and then of it": lambda a: a.mean(1)[0][3],
    "the mean times a value": lambda a: a.mean(1) @ torch.arange(10.0).view(5, 2),
    "the mean times a vector": lambda a: a.mean(1) @ torch.arange(5.0),
    "a vector times the mean": lambda a: torch.arange(5.0) @ a.mean(1),
    "the transposed mean": lambda a: a.mean(1).mT @ torch.arange(10.0).view(5, 2),
    "the last row": lambda a: a[..., -1, :],
    "one head after the other": lambda a: torch.stack([head[-1] for head in a[0]]),
    "bertviz": lambda a: torch.stack([each.squeeze(0) for each in (a, a)]),
    "detach, cpu, to": lambda a: a.detach().cpu().to(torch.float64)[0, 0, 1],
    "its size": lambda a: torch.tensor([*a.size(), a.size(-1), a.ndim, len(a.shape)]),
}


@pytest.mark.parametrize("idiom", IDIOMS.values(), ids=IDIOMS)
def test_scripts_for_weights_run_on_matrices(
    idiom: Callable[[regard.AttentionMatrix | Tensor], Tensor],
) -> None:
    torch.testing.assert_close(idiom(even()), idiom(even().to_dense()), check_dtype=False)


def test_the_mean_of_all_heads_as_a_tensor() -> None:
    torch.testing.assert_close(even().mean(1).to_dense(), even().to_dense().mean(1))
    assert even().mean(1).shape == (1, 5, 5)
    with pytest.raises(MemoryError, match="to_dense"):
        even().mean(1).to_dense(limit=10)


@pytest.mark.parametrize("dim", [0, 2, -1, 7])
def test_a_mean_over_another_axis_says_what_to_ask(dim: int) -> None:
    with pytest.raises(
        ValueError, match=r"mean\(\) is over the heads, dim=-3\.\n    For means over"
    ):
        even().mean(dim)


def test_a_row_is_not_squeezed() -> None:
    with pytest.raises(ValueError, match=r"its last two axes stay\.\n    Take a row"):
        even().squeeze(-1)


@pytest.mark.parametrize("function", [torch.cat, torch.sum, torch.mean, torch.argmax])
def test_what_would_form_the_matrix_says_what_to_ask(function: Callable[..., object]) -> None:
    argument = [even(), even()] if function is torch.cat else even()
    with pytest.raises(TypeError, match=r"only torch.matmul and torch.stack do\.\n    Use A.topk"):
        function(argument)
