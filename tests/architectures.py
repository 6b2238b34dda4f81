"""Architectures of transformers, small and with random weights, for test_architectures.

Sizes are prime where they may be, so that exchanged axes cannot pass. Each has a batch of two, the
second of them padded where the model takes padding.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from models import SIZES, TEXT, VOCABULARY, ids, noise, padded

GROUPED = {**SIZES, **TEXT, "num_key_value_heads": 2}
HEAD = {**GROUPED, "head_dim": 8}
VISION = {**SIZES, "image_size": 12, "patch_size": 4}
IMAGE = 17
"""The token that stands for a part of an image."""


@dataclass(frozen=True)
class Architecture:
    """A model and what to run it on.

    Attributes:
        model: its class in transformers.
        config: the class of its configuration.
        options: of the configuration.
        inputs: keyword arguments of its forward.
        kinds: the implementations of attention that it has.
        says: what the repr of its first and last matrix has beside the shape.
    """

    model: str
    config: str
    options: dict[str, Any]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("sdpa", "eager")
    says: tuple[str, str] = ("", "")

    def build(self, kind: str) -> torch.nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options, attn_implementation=kind)
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "sinks" in name:  # they begin as memory that nobody wrote
                    parameter.copy_(torch.linspace(-1, 1, len(parameter)))
        return model


def text(length: int = 7, short: int = 4) -> dict[str, Tensor]:
    return {"input_ids": ids(length), "attention_mask": padded(short)}


def pictures(size: int = 12) -> Tensor:
    return noise(2, 3, size, size)


def about_pictures() -> dict[str, Tensor]:
    """Nine places for the parts of an image, then text, the second one padded."""
    tokens = torch.cat((torch.full((2, 9), IMAGE), ids(5)), 1)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": pictures()}


TWO_TEXTS = {**text(), "decoder_input_ids": ids(5)}
NO_FLEX = ("sdpa", "eager")
CAUSAL = ("mask=Causal() & Padding([7, 4])",) * 2
PADDED = ("mask=Padding([7, 4])",) * 2
# Padded by fewer tokens than the window has, so that every query has a key.
WINDOW, FULL = (f"mask={mask} & Padding([7, 5])" for mask in ("SlidingWindow(2, 0)", "Causal()"))

T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 37}
T5 |= {"num_layers": 2, "decoder_start_token_id": 0}
BART = {**TEXT, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_ffn_dim": 37, "decoder_ffn_dim": 37}
WHISPER = {k: v for k, v in BART.items() if k != "max_position_embeddings"}
WHISPER |= {"num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": 13}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 61, "vocab_size": VOCABULARY}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
DISTILBERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 61, "dim": 32, "n_layers": 2}
DISTILBERT |= {"n_heads": 4, "hidden_dim": 37}
TWO_TOWERS = {"text_config": {**SIZES, **TEXT, "eos_token_id": 2, "projection_dim": 16}}
TWO_TOWERS |= {"vision_config": {**VISION, "projection_dim": 16}}
SPEECH = {"input_features": noise(2, 5, 22), "decoder_input_ids": ids(5)}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 40}
LLAVA = {
    "text_config": {"model_type": "llama", **HEAD},
    "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 16},
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -1,
}
PALIGEMMA = {
    "text_config": {"model_type": "gemma", **HEAD},
    "vision_config": {"model_type": "siglip_vision_model", **VISION},
    "image_token_id": IMAGE,
    "projection_dim": 32,
}

ARCHITECTURES = {
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", GROUPED, text(), says=CAUSAL),
    "Mistral, window": Architecture(
        "MistralForCausalLM",
        "MistralConfig",
        {**GROUPED, "sliding_window": 3},
        text(short=5),
        says=(WINDOW, WINDOW),
    ),
    "Gemma 2": Architecture(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**HEAD, **ALTERNATING, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 0.5},
        text(short=5),
        kinds=("eager",),
        says=(f"softcap=0.5, {WINDOW}", f"softcap=0.5, {FULL}"),
    ),
    "Gemma 3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**HEAD, **ALTERNATING},
        text(short=5),
        says=(WINDOW, FULL),
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**HEAD, **ALTERNATING, **EXPERTS},
        text(short=5),
        kinds=("eager",),
        says=(f"sink_bias=(1, 4, 1, 1), {WINDOW}", f"sink_bias=(1, 4, 1, 1), {FULL}"),
    ),
    "Qwen 3": Architecture("Qwen3ForCausalLM", "Qwen3Config", HEAD, text(), says=CAUSAL),
    "GPT-2": Architecture(
        "GPT2LMHeadModel", "GPT2Config", GPT2, text(), kinds=NO_FLEX, says=CAUSAL
    ),
    "GPT-NeoX": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, **TEXT}, text(), says=CAUSAL
    ),
    "Phi": Architecture("PhiForCausalLM", "PhiConfig", GROUPED, text(), says=CAUSAL),
    "OLMo": Architecture("OlmoForCausalLM", "OlmoConfig", GROUPED, text(), says=CAUSAL),
    "BLOOM": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        text(),
        kinds=("eager",),
    ),
    "Falcon": Architecture(
        "FalconForCausalLM", "FalconConfig", {**SIZES, **TEXT}, text(), kinds=NO_FLEX, says=CAUSAL
    ),
    "BERT": Architecture("BertForMaskedLM", "BertConfig", {**SIZES, **TEXT}, text(), says=PADDED),
    "RoBERTa": Architecture(
        "RobertaForMaskedLM", "RobertaConfig", {**SIZES, **TEXT}, text(), says=PADDED
    ),
    "DistilBERT": Architecture(
        "DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT, text(), says=PADDED
    ),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        TWO_TEXTS,
        # Older versions of transformers have T5 with eager attention alone.
        kinds=NO_FLEX if transformers.T5PreTrainedModel._supports_sdpa else ("eager",),
    ),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", BART, TWO_TEXTS),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, SPEECH, kinds=NO_FLEX
    ),
    "ViT": Architecture(
        "ViTForImageClassification", "ViTConfig", VISION, {"pixel_values": pictures()}
    ),
    "CLIP": Architecture(
        "CLIPModel", "CLIPConfig", TWO_TOWERS, {**text(), "pixel_values": pictures()}
    ),
    "SigLIP": Architecture(
        "SiglipModel", "SiglipConfig", TWO_TOWERS, {**text(), "pixel_values": pictures()}
    ),
    "LLaVA": Architecture("LlavaForConditionalGeneration", "LlavaConfig", LLAVA, about_pictures()),
    "PaliGemma": Architecture(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig", PALIGEMMA, about_pictures()
    ),
}
