# regard.check(Attention, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.W_O = nn.Parameter(torch.randn(heads, dim // heads, dim))
        self.b_O = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.heads, -1) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -1e9)
        z = torch.einsum("bhqk,bkhe->bhqe", scores.softmax(-1), v)
        per_head = torch.einsum("bhqe,hed->bqhd", z, self.W_O)
        return per_head.sum(2) + self.b_O
