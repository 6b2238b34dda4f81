"""Kinds of attention that vLLM serves, compared with transformers' eager attention."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regard.vllm

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

PROMPTS = ["w1 w2 w3 w1 w2", " ".join(f"w{number % 100}" for number in range(40))]
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
SIDES = ("encoder", "decoder")
PARTS = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}


def gemma2() -> Any:
    """Softcap, and sliding and full layers."""
    options = {**COMMON, **MIXED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**options))


def gemma3() -> Any:
    """Sliding and full layers."""
    options = {**COMMON, **MIXED, "query_pre_attn_scalar": 32}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**options))


def gemma3n() -> Any:
    """Layers that share the keys of earlier ones."""
    small = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
    options = {**COMMON, **MIXED, **PER_LAYER, **small, "num_kv_shared_layers": 2}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**options))


def gemma4() -> Any:
    """Head sizes that differ by layer, and layers that share the keys of earlier ones."""
    options = {**COMMON, **MIXED, **PER_LAYER, "num_kv_shared_layers": 2, "global_head_dim": 64}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**options))


def gpt_oss() -> Any:
    """Sinks, and sliding and full layers."""
    options = {**COMMON, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}
    options["initializer_range"] = 0.2  # with 0.3 scores are 80, and lose a digit in each layer
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**options))


def bloom() -> Any:
    """ALiBi."""
    options = {"n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    config = transformers.BloomConfig(vocab_size=128, hidden_size=128, **options)
    model = transformers.BloomForCausalLM(config)
    for name, parameter in model.named_parameters():
        if ".mlp." in name:  # transformers approximates GELU there, and vLLM does not
            torch.nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("make", [gemma2, gemma3, gemma3n, gemma4, gpt_oss, bloom])
def test_weights_equal_eager_attention_and_answers_do_not_change(
    make: Callable[[], Any],
    save_model: Callable[[Any, Path], None],
    load_llm: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    save_model(model, tmp_path)
    llm = load_llm(tmp_path, max_model_len=128)
    params = vllm.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    before = llm.generate(PROMPTS, params, use_tqdm=False)
    with regard.vllm.observe(llm) as seen:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    (part,) = regard.vllm.record(llm, PROMPTS[1:], params, layers=[1], heads=[1, 2])
    eager = type(model).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    for plain, output in zip(before, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert plain.outputs[0].token_ids == answer
        ids = torch.tensor([[*output.prompt_token_ids, *answer][:-1]])
        with torch.no_grad():
            attentions = eager.eval()(ids, output_attentions=True).attentions
        assert (len(seen[output]), seen[output].refused) == (len(attentions), [])
        for matrix, weights in zip(seen[output].values(), attentions, strict=True):
            torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)
    torch.testing.assert_close(part[0].to_dense(), seen[outputs[1]][1].to_dense()[:, [1, 2]])
    del llm
    gc.collect()


def test_cross_attention_of_whisper_equals_eager_attention(
    load_llm: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": size for part in SIDES for name, size in PARTS.items()}
    special = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=128, max_target_positions=64, init_std=0.15, **sizes, **special
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer = transformers.WhisperTokenizer(vocab={}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|startoftranscript|>", "<|en|>"]})
    sound = transformers.WhisperFeatureExtractor()
    transformers.WhisperProcessor(sound, tokenizer).save_pretrained(tmp_path)
    llm = load_llm(tmp_path, max_model_len=64)
    text, rate = "<|startoftranscript|><|en|>", sound.sampling_rate
    sounds = [torch.randn(seconds * rate).numpy() for seconds in (3, 2, 4)]
    prompts = [{"prompt": text, "multi_modal_data": {"audio": (each, rate)}} for each in sounds]
    params = vllm.SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    before = llm.generate(prompts, params, use_tqdm=False)
    with regard.vllm.observe(llm) as seen:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    (part,) = regard.vllm.record(llm, prompts[1:2], params, layers=[1], heads=[1, 2])
    eager = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for each, plain, output in zip(sounds, before, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert plain.outputs[0].token_ids == answer
        ids = torch.tensor([[*output.prompt_token_ids, *answer][:-1]])
        features = sound(each, sampling_rate=rate, return_tensors="pt").input_features
        with torch.no_grad():
            dense = eager(features, decoder_input_ids=ids, output_attentions=True)
        pairs = zip(dense.decoder_attentions, dense.cross_attentions, strict=True)
        expected = [weights for pair in pairs for weights in pair]
        assert (len(seen[output]), seen[output].refused) == (4, [])
        for matrix, weights in zip(seen[output].values(), expected, strict=True):
            torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)
    torch.testing.assert_close(part[0].to_dense(), seen[outputs[1]][1].to_dense()[:, [1, 2]])
    del llm
    gc.collect()
