"""Lazy models in other packages: Trainer, Accelerate, PEFT, BertViz, Whisper's own generate."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import regard
from models import ids
from regard.transformers import lazy

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}


def bert(kind: str = "sdpa", made: Any = BertModel) -> Any:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, intermediate_size=37, attn_implementation=kind)
    return made(config).eval()


def llama(kind: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=37)
    config._attn_implementation = kind
    return LlamaForCausalLM(config).eval()


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected) > 0
    for matrix, weights in zip(found, expected, strict=True):
        assert isinstance(matrix, regard.AttentionMatrix)
        dense = matrix.to_dense().to(weights.dtype)
        torch.testing.assert_close(dense, weights, atol=tolerance, rtol=0)


def test_trainer_predicts_with_lazy_attentions(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    model = bert(made=BertForSequenceClassification)
    items = [{"input_ids": each, "labels": torch.tensor(0)} for each in ids()]
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True
    )
    trainer = Trainer(model, arguments, eval_dataset=items)
    expected = trainer.predict(items).predictions
    with lazy(model, output_attentions=True):
        found = trainer.predict(items, ignore_keys=["attentions"]).predictions
    assert (found == expected).all()


def test_accelerate_casts_the_outputs_of_a_lazy_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)  # that of an earlier Trainer
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model, twin = bert(), bert("eager")
    with torch.no_grad(), lazy(model):
        prepared = accelerator.prepare(model)
        found = prepared(ids(), output_attentions=True).attentions
    with torch.no_grad():
        expected = accelerator.prepare(twin)(ids(), output_attentions=True).attentions
    assert found[0].dtype == torch.float32
    assert_equal(found, expected, 0.01)


def test_a_model_inside_distributed_data_parallel_is_lazy() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = llama()
        with lazy(model), torch.no_grad():
            parallel = nn.parallel.DistributedDataParallel(model)
            found = parallel(ids(), output_attentions=True).attentions
        assert_equal(found, llama("eager")(ids(), output_attentions=True).attentions)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls what transformers deprecates
@pytest.mark.parametrize("is_first", [True, False])
def test_a_peft_model_is_lazy(is_first: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is installed by `make test-outputs`")

    def tuned(kind: str, *, asks: bool) -> Any:
        model = llama(kind)
        if asks and is_first:
            lazy(model)
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
        if asks and not is_first:
            lazy(model)
        return model

    with torch.no_grad():
        found = tuned("sdpa", asks=True)(input_ids=ids(), output_attentions=True).attentions
        expected = tuned("eager", asks=False)(input_ids=ids(), output_attentions=True).attentions
    assert_equal(found, expected)


@pytest.mark.filterwarnings("ignore")  # BertViz leaves its files open
@pytest.mark.parametrize("view", ["model_view", "head_view"])
def test_bertviz_draws_lazy_attentions(view: str) -> None:
    bertviz = pytest.importorskip("bertviz", reason="bertviz is installed by `make test-outputs`")
    tokens = [f"t{place}" for place in range(ids().shape[1])]

    def drawn(kind: str) -> Tensor:
        model = bert(kind)
        with torch.no_grad(), lazy(model) if kind == "sdpa" else nullcontext():
            attentions = model(ids()[:1], output_attentions=True).attentions
        page = getattr(bertviz, view)(attentions, tokens, html_action="return").data
        shown, _ = json.JSONDecoder().raw_decode(page, page.index('{"attention"'))
        return torch.tensor(shown["attention"][0]["attn"])

    assert drawn("sdpa").shape == (2, 4, len(tokens), len(tokens))
    torch.testing.assert_close(drawn("sdpa"), drawn("eager"), atol=1e-5, rtol=0)


def whisper(kind: str) -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    lengths = {"max_source_positions": 20, "max_target_positions": 20, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(
        **{**sizes, **heads, **lengths, **tokens, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    )
    config._attn_implementation = kind
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config.update(suppress_tokens=None, begin_suppress_tokens=None)
    return model


def test_whisper_generates_with_lazy_attentions() -> None:
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    model = whisper("sdpa")
    with torch.no_grad(), lazy(model):
        found = model.generate(features, do_sample=False, **options)
    with torch.no_grad():
        expected = whisper("eager").generate(features, do_sample=False, **options)
    assert torch.equal(found["sequences"], expected["sequences"])
    for field in ("decoder_attentions", "cross_attentions"):
        for step, weights in zip(found[field], expected[field], strict=True):
            for matrix, each in zip(step, weights, strict=True):
                # Whisper takes the texts apart, and stacks those of single tokens.
                dense = matrix if isinstance(matrix, Tensor) else matrix.to_dense()
                torch.testing.assert_close(dense, each, atol=1e-5, rtol=0)
