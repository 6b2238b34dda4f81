# regard.check(LinearAttention, 16, 4)
# regard.spec() - another kind: linear (efficient) attention
"""No softmax over scores: a softmax of queries and one of keys (efficient attention)."""
import torch
from torch import nn


class LinearAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context = k.softmax(dim=-2).transpose(-2, -1) @ v
        return self.o((q.softmax(dim=-1) @ context).transpose(1, 2).flatten(2))
