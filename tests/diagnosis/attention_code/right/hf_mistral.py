# regard.check(Mistral(), causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions={"kind": "rotary", "pairing": "halves"})
import torch
from torch import nn
from transformers import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding


class Mistral(nn.Module):
    def __init__(self):
        super().__init__()
        config = MistralConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        config._attn_implementation = "sdpa"
        self.rotary = MistralRotaryEmbedding(config)
        self.attention = MistralAttention(config, layer_idx=0)

    def forward(self, x):
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.attention(x, position_embeddings=angles, attention_mask=None)[0]
