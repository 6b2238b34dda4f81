# regard.check(RotaryCacheAttention, 32, 4, args=(torch.randn(2, 6, 32), *cos_sin(32, 8)), causal=True)
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","base":10000.0,"pairing":"halves"})
"""Decoder attention with tables of the whole context and cached keys (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryCacheAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin, past_kv=None):
        """Causal. cos, sin: (max_position, head_dim); past_kv: rotated keys and values, (b, h, past, d)."""
        b, t, c = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        cos, sin = cos[:t], sin[:t]  # <- law cache
        q = q * cos + rotate_half(q) * sin  # <- law cache
        k = k * cos + rotate_half(k) * sin  # <- law cache
        if past_kv is not None:
            k = torch.cat([past_kv[0], k], dim=2)
            v = torch.cat([past_kv[1], v], dim=2)
        s = k.size(2)
        mask = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, c)), (k, v)


def cos_sin(tokens, dim):
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
