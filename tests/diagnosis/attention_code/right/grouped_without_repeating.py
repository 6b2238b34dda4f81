# regard.check(GQA, 32, 8, 2, causal=True)
# regard.spec(causal=True, heads=8, kv_heads=2, positions=None)
"""The groups stay an axis of their own; nothing is repeated."""
import torch
from torch import nn


class GQA(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.kv, self.group, self.d = kv_heads, heads // kv_heads, dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.kv, self.group, self.d)
        k = self.k(x).view(b, n, self.kv, self.d)
        v = self.v(x).view(b, n, self.kv, self.d)
        s = torch.einsum("bikgd,bjkd->bkgij", q, k) / self.d**0.5
        s = s.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return self.o(torch.einsum("bkgij,bjkd->bikgd", s.softmax(-1), v).flatten(2))
