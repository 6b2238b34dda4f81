"""Answers of generation's steps that do not join: where they stand."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard


def test_an_answer_that_stands_apart_says_where() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 11}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    with regard.observe(model, keep=[regard.Entropy(), regard.Pool(2, 2)]) as seen:
        model.generate(torch.arange(3, 8)[None], max_new_tokens=2, min_new_tokens=2)
    name = "model.layers.0.self_attn"
    with pytest.raises(regard.RegardError) as refusal:
        seen.layers[0].reduce(regard.Pool(2, 2))
    assert str(refusal.value) == (
        f"layer '{name}' has no answer to {regard.Pool(2, 2)!r} over all calls; "
        "answers that do not join stand apart, call by call.\n"
        f"    Ask the layers '{name}[0:5]', '{name}[5:6]'."
    )
