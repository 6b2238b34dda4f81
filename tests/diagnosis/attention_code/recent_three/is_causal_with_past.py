# regard.check(CachedCausalAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""Attention with past keys and values, for generation (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CachedCausalAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def _shape(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, past_key_value=None):
        """past_key_value: (keys, values) of the tokens before, each (batch, heads, past, head_dim)."""
        query = self._shape(self.q_proj(hidden_states))
        key = self._shape(self.k_proj(hidden_states))
        value = self._shape(self.v_proj(hidden_states))
        if past_key_value is not None:
            key = torch.cat([past_key_value[0], key], dim=2)
            value = torch.cat([past_key_value[1], value], dim=2)
        present = (key, value)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # <- causal-top-left
        out = out.transpose(1, 2).reshape(hidden_states.shape)
        return self.o_proj(out), present
