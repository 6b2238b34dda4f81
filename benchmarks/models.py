"""The weights of one head of a real model: regard against attnread, where both can run."""

import os
from pathlib import Path
from typing import Any

import torch

import regard
from benchmarks.case import Effort, LeftOut, Measured, need
from benchmarks.turns import ratio

__all__ = ["against_attnread"]

FOLDER = "SMOLLM2"  # the environment variable that names a folder with SmolLM2
LAYER, HEAD = 0, 3


def against_attnread(effort: Effort) -> Measured:
    """How many runs of attnread ours takes: the dense weights of one head, model run included."""
    need("attnread")
    from attnread import extract_attention

    model = language_model()
    tokens = torch.randint(model.config.vocab_size, (1, effort.tokens))

    def ours() -> object:
        with torch.no_grad(), regard.observe(model) as seen:
            model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return seen[LAYER][0, HEAD].to_dense()

    def theirs() -> object:
        return extract_attention(model, {"input_ids": tokens}, heads=[(LAYER, HEAD)])

    return ratio(ours, theirs, effort.repetitions)


def language_model() -> Any:
    """SmolLM2 from the folder that the environment names, as safetensors or as GGUF."""
    need("transformers")
    from transformers import AutoModelForCausalLM

    if FOLDER not in os.environ:
        raise LeftOut(f"no model: set {FOLDER} to a folder with SmolLM2")
    folder = Path(os.environ[FOLDER])
    packed = next((path.name for path in folder.glob("*.gguf")), None)
    options = {} if packed is None else {"gguf_file": packed}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
