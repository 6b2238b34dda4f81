# regard.check(MLA, 32, 4, args=(torch.randn(2, 6, 32), (torch.arange(6)[:, None] * 10.0 ** -torch.arange(2)).cos(), (torch.arange(6)[:, None] * 10.0 ** -torch.arange(2)).sin()), causal=True)
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","pairing":"neighbours","part":4/12})
"""Latent attention with decoupled rotary, tables given (2025)."""
import torch
from torch import nn
import torch.nn.functional as F


def rotate(x, cos, sin):
    """x: (batch, heads, tokens, dim); cos, sin: (tokens, dim // 2)"""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class MLA(nn.Module):
    def __init__(self, dim, n_heads, kv_rank=16, nope=8, rope=4, v_dim=8):
        super().__init__()
        self.n_heads, self.kv_rank, self.nope, self.rope, self.v_dim = n_heads, kv_rank, nope, rope, v_dim
        self.q_proj = nn.Linear(dim, n_heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_up = nn.Linear(kv_rank, n_heads * (nope + v_dim), bias=False)
        self.o_proj = nn.Linear(n_heads * v_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        """Causal; cos, sin: (tokens, rope // 2). The rotary part of the key is shared by all heads."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_down(x).split([self.kv_rank, self.rope], dim=-1)
        k_nope, v = (
            self.kv_up(latent).view(b, t, self.n_heads, -1).transpose(1, 2).split([self.nope, self.v_dim], dim=-1)
        )
        q_rope = rotate(q_rope, cos, sin)
        k_rope = k_rope[:, None].expand(-1, self.n_heads, -1, -1)  # <- law score
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # <- law score
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
