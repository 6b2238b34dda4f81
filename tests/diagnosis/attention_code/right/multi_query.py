# regard.check(MultiQueryAttention, 24, 4, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=1, positions=None)
"""One head of keys and values for all heads of queries, by broadcasting."""
import torch
from torch import nn


class MultiQueryAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.d = heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * self.d)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, self.d)
        k, v = self.kv(x).split(self.d, dim=-1)
        s = torch.einsum("bihd,bjd->bhij", q, k) / self.d**0.5
        s = s + torch.full((n, n), float("-inf")).triu(1)
        return self.o(torch.einsum("bhij,bjd->bihd", s.softmax(-1), v).flatten(2))
