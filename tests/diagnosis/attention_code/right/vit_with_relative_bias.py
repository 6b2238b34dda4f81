# regard.check(WindowAttention, 16, 4, 9)
# regard.spec(causal=False, heads=4, positions="table")
"""A learned bias for each pair of places in a window, as Swin has it."""
import torch
from torch import nn


class WindowAttention(nn.Module):
    def __init__(self, dim, heads, tokens):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.bias = nn.Parameter(torch.randn(heads, 64, 64) * 0.02)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1) + self.bias[:, :n, :n]
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))
