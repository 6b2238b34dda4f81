# regard.check(Qwen3(), causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions="rotary", qk_norm="rms")
"""Queries and keys are normalised, and then turned."""
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding


class Qwen3(nn.Module):
    def __init__(self):
        super().__init__()
        config = Qwen3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        config._attn_implementation = "sdpa"
        self.rotary = Qwen3RotaryEmbedding(config)
        self.attention = Qwen3Attention(config, layer_idx=0)

    def forward(self, x):
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.attention(x, position_embeddings=angles, attention_mask=None)[0]
