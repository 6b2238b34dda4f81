"""SmolLM2-135M, served by vLLM in this process, compared with transformers' eager attention."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard.vllm

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
PROMPTS = ["Life is short, eat dessert first", "def attention(query, key, value):\n    return"]


@pytest.mark.skipif("SMOLLM2" not in os.environ, reason="set SMOLLM2 to the folder of the model")
def test_weights_of_smollm2_equal_eager_attention(
    load_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = Path(os.environ["SMOLLM2"])
    llm = load_llm(folder)
    params = vllm.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    before = llm.generate(PROMPTS, params, use_tqdm=False)
    with regard.vllm.observe(llm) as seen:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for plain, output in zip(before, outputs, strict=True):
        assert plain.outputs[0].token_ids == output.outputs[0].token_ids
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.no_grad():
            attentions = model(torch.tensor([ids[:-1]]), output_attentions=True).attentions
        for matrix, weights in zip(seen[output].values(), attentions, strict=True):
            torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)
