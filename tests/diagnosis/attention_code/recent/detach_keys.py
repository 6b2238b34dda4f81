# regard.check(SelfAttention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.detach().mT / q.size(-1) ** 0.5  # <- law gradient
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))
