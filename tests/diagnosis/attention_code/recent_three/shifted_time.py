# regard.check(ShiftedLocalAttention, 32, 4, args=(torch.randn(2, 12, 32),), axes="batch tokens dim", causal=False)
# regard.spec(causal=False, window=regard.ANY, heads=4, positions=None)
"""Shifted windows for time series (2023): windows along the time axis."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class ShiftedLocalAttention(nn.Module):
    """x: (batch, time, dim); attention inside windows which lie half a window further on; the edge wraps around."""

    def __init__(self, dim, heads, window=4):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, window // 2
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        pad = -n % self.window
        assert pad == 0, "the length must be a multiple of the window"
        x = torch.roll(x, -self.shift, dims=1)
        x = x.view(b * n // self.window, self.window, d)
        q, k, v = (y.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).reshape(b, n, d)
        y = torch.roll(y, self.shift, dims=1)
        return self.proj(y)
