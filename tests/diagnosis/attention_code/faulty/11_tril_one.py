# regard.check(CausalSelfAttention, 16, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, longest=64):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest), diagonal=1))  # <- causal-off-by-one

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (
            y.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for y in self.qkv(x).split(w, dim=2)
        )
        att = q @ k.transpose(-2, -1) * (w // self.heads) ** -0.5
        att = att.masked_fill(self.bias[:t, :t] == 0, float("-inf"))  # <- causal-off-by-one
        y = att.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, w))
