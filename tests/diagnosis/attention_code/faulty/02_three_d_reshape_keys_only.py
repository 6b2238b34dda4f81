# regard.check(MultiHead, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
"""Queries are transposed; somebody copied the other two from elsewhere."""
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x):
        b, n, size = x.shape
        w = size // self.heads
        q = self.q(x).reshape(b, self.heads, n, w)  # <- heads-split-without-transpose
        k = self.k(x).reshape(b, self.heads, n, w)  # <- heads-split-without-transpose
        v = self.v(x).reshape(b, self.heads, n, w)  # <- heads-split-without-transpose
        sim = torch.einsum("bhid,bhjd->bhij", q, k) / w**0.5
        out = torch.einsum("bhij,bhjd->bihd", sim.softmax(dim=-1), v)
        return self.o(out.flatten(2))
