"""A tiny model that vLLM and transformers can both load."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

# vLLM reads these as it starts: 1 GiB of keys and values, any core, errors alone in the log.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(125))]


def save(model: PreTrainedModel, path: Path) -> None:
    """Save a model of 128 words with its tokenizer."""
    model.save_pretrained(path)
    words = models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)


@pytest.fixture(scope="session")
def save_model() -> Callable[[PreTrainedModel, Path], None]:
    return save


def load(path: Path, **options: Any) -> Any:
    """Start vLLM in this process."""
    from vllm import LLM

    usual: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "gpu_memory_utilization": 0.1,  # of the memory of the machine
        "enforce_eager": True,
    }
    return LLM(str(path), **{**usual, **options})


@pytest.fixture(scope="session")
def load_llm() -> Callable[..., Any]:
    return load


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,  # so that attention is far from uniform
    )
    save(LlamaForCausalLM(config), path)
    return path
