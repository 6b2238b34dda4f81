# regard.check(StaticCacheAttention, 32, 4, args=(torch.randn(2, 1, 32), torch.randn(2, 4, 12, 8), torch.randn(2, 4, 12, 8), 5))
# regard.spec(causal=True, heads=4, positions=None)
"""Static key-value cache, one token at a time (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class StaticCacheAttention(nn.Module):
    """Decoding step: x is the token at place pos, its output reads the places 0 .. pos."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, k_cache, v_cache, pos: int):
        """x: (batch, 1, dim); k_cache, v_cache: (batch, heads, max_len, head_dim)"""
        b, t, d = x.shape
        q = self.wq(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        k_cache[:, :, pos : pos + t] = self.wk(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        v_cache[:, :, pos : pos + t] = self.wv(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        keys, values = k_cache[:, :, : pos + t], v_cache[:, :, : pos + t]
        y = F.scaled_dot_product_attention(q, keys, values)
        y = y.transpose(1, 2).reshape(b, t, d)
        return self.wo(y), k_cache, v_cache
