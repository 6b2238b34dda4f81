# regard.check(Gemma2(), causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, scale=16**-0.5, softcap=50.0, positions="rotary")
"""A softcap of 50 and a scale of its own."""
import torch
from torch import nn
from transformers import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding


class Gemma2(nn.Module):
    def __init__(self):
        super().__init__()
        config = Gemma2Config(
            hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            query_pre_attn_scalar=16, num_hidden_layers=2,
        )
        config._attn_implementation = "eager"
        self.rotary = Gemma2RotaryEmbedding(config)
        self.attention = Gemma2Attention(config, layer_idx=1)

    def forward(self, x):
        n = x.shape[1]
        mask = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)[None, None]
        angles = self.rotary(x, torch.arange(n)[None])
        return self.attention(x, position_embeddings=angles, attention_mask=mask)[0]
