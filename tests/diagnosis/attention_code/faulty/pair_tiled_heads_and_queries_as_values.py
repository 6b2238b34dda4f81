# regard.check(GroupedAttention, 40, 4, 2, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None)
import torch
from torch import nn


class GroupedAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.hd = heads, kv_heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, self.hd * kv_heads)
        self.v = nn.Linear(dim, self.hd * kv_heads)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q = self.q(x).view(b, n, self.heads, self.hd).transpose(1, 2)
        k = self.k(x).view(b, n, self.kv_heads, self.hd).transpose(1, 2)
        k = k.repeat(1, self.heads // self.kv_heads, 1, 1)  # <- kv-heads-repeated-in-wrong-order
        s = q @ k.transpose(-2, -1) / self.hd**0.5
        s = s.masked_fill(torch.ones(n, n).triu(1).bool(), -1e9)
        y = s.softmax(dim=-1) @ q  # <- wrong-values
        return self.o(y.transpose(1, 2).reshape(b, n, d))
