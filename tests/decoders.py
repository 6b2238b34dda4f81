"""Small models that write text, and what they are given."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from models import BART, GPT2, LLAMA, T5, VOCABULARY, ids, llama_head, mistral_head, noise, of

TWO_KINDS = {**LLAMA, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**TWO_KINDS, "sliding_window": 5, "query_pre_attn_scalar": 8}
OSS = {**TWO_KINDS, "intermediate_size": 32, "sliding_window": 4}
OSS |= {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
WHISPER = {"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 5, "max_source_positions": 11}
WHISPER |= {"encoder_layers": 1, "decoder_layers": 2, "max_target_positions": 61}
WHISPER |= {"encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "decoder_attention_heads": 4}
WHISPER |= {"encoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
DECODERS = {
    "llama": llama_head,
    "mistral, a window of 3": mistral_head,
    "gpt2": of(GPT2LMHeadModel, GPT2Config, **GPT2),
    "gemma 2, windows and softcap": of(Gemma2ForCausalLM, Gemma2Config, **GEMMA),
    "gemma 3, windows": of(Gemma3ForCausalLM, Gemma3TextConfig, **GEMMA),
    "gpt-oss, windows and sinks": of(GptOssForCausalLM, GptOssConfig, **OSS),
}
ONLY_EAGER = {"gemma 2, windows and softcap", "gpt-oss, windows and sinks"}
TWO_TEXTS = {
    "t5": of(T5ForConditionalGeneration, T5Config, **T5, d_ff=37, decoder_start_token_id=0),
    "bart": of(BartForConditionalGeneration, BartConfig, **BART, decoder_start_token_id=2),
    "whisper": of(WhisperForConditionalGeneration, WhisperConfig, **WHISPER),
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
GREEDY |= {"return_dict_in_generate": True}


def built(name: str, kind: str | None = None) -> Any:
    """A model with weights large enough that attention is not nearly even, and texts differ."""
    own = "eager" if name in ONLY_EAGER else "sdpa"
    model = (DECODERS | TWO_TEXTS)[name](kind or own).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 1))
    return model


def inputs(name: str, padded: int = 0) -> dict[str, Tensor]:
    if name == "whisper":
        return {"input_features": noise(2, 5, 22)}
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, slice(0, padded) if name in DECODERS else slice(7 - padded, 7)] = 0
    return {"inputs": ids(), "attention_mask": mask}


def layer_of(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())
