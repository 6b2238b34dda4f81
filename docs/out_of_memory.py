"""Print the error at the top of the README: eager attention meets a text of 32,768 tokens.

The address space is limited to 32 GiB, so that it fails in the same line on any Linux or macOS machine.
The model is small and has random weights; only its 32 heads and the text count.
"""

import re
import resource
import traceback

import torch
from transformers import LlamaConfig, LlamaForCausalLM

resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
config = LlamaConfig(hidden_size=256, num_attention_heads=32, num_hidden_layers=1, vocab_size=100)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model.set_attn_implementation("eager")
try:
    with torch.no_grad():
        model.model(torch.randint(100, (1, 32_768)), output_attentions=True)
except RuntimeError as error:
    lines = traceback.format_exc().split("\n")
    start = max(number for number, line in enumerate(lines) if line.startswith("  File"))
    frame = re.sub(r'"/.*/', '".../', "\n".join(lines[start : start + 2]))
    print(frame)
    words = re.search(r"DefaultCPUAllocator: .*? bytes\.", str(error))
    print(f"{type(error).__name__}: ... {words[0] if words else error}")
