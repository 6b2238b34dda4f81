# regard.check(Llama(), causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions={"kind": "rotary", "pairing": "halves"})
"""LlamaAttention wants the rotary angles and a mask from outside."""
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
        config._attn_implementation = "sdpa"
        self.rotary = LlamaRotaryEmbedding(config)
        self.attention = LlamaAttention(config, layer_idx=0)

    def forward(self, hidden_states):
        positions = torch.arange(hidden_states.shape[1])[None]
        angles = self.rotary(hidden_states, positions)
        return self.attention(hidden_states, position_embeddings=angles, attention_mask=None)[0]
