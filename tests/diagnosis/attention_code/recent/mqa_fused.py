# regard.check(MultiQueryAttention, 32, n_head=4, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=1, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiQueryAttention(nn.Module):
    """StarCoder-like: many query heads, one key/value head; fused projection."""

    def __init__(self, n_embd, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.kv_dim = n_embd // n_head
        self.c_attn = nn.Linear(n_embd, n_embd + 2 * self.kv_dim)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        query, key, value = self.c_attn(x).split((C, self.kv_dim, self.kv_dim), dim=2)
        query = query.view(B, T, self.n_head, self.kv_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            query, key.unsqueeze(1), value.unsqueeze(1), is_causal=True, enable_gqa=True
        )
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))
