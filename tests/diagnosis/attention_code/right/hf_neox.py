# regard.check(NeoX(), causal=True)
# regard.spec(causal=True, heads=4, positions={"kind": "rotary", "pairing": "halves", "part": 0.25})
"""Only a quarter of each head is turned."""
import torch
from torch import nn
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding


class NeoX(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, intermediate_size=16)
        config._attn_implementation = "sdpa"
        self.rotary = GPTNeoXRotaryEmbedding(config)
        self.attention = GPTNeoXAttention(config, layer_idx=0)

    def forward(self, x):
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.attention(x, position_embeddings=angles, attention_mask=None)[0]
