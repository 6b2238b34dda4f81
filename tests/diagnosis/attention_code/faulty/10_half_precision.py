# regard.check(CausalAttention(16, 2).half(), causal=True)
# regard.spec(causal=True, heads=2, positions=None)
"""float16 ends at 65504."""
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        att = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
        att = att.masked_fill(torch.ones(t, t).tril() == 0, -1e9)  # <- mask-fill-value
        return (att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)
