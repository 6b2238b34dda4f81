# regard.check(ShiftedWindowAttention(16, 4, window=4, shift=2), args=(torch.randn(2, 8, 16),), causal=False)
# regard.spec(causal=False, window=regard.ANY, heads=4, positions=None)
import torch
from torch import nn


class ShiftedWindowAttention(nn.Module):
    """One dimension, windows of 4 tokens, shifted by 2 without a mask (cyclic)."""

    def __init__(self, dim, heads, window, shift):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        x = torch.roll(x, -self.shift, dims=1)
        w = x.view(B * N // self.window, self.window, C)
        q, k, v = self.qkv(w).view(*w.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        att = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        y = (att @ v).transpose(1, 2).reshape(B, N, C)
        y = torch.roll(y, -self.shift, dims=1)  # <- law runs
        return self.proj(y)
