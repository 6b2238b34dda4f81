# regard.check(PiecewiseAttention, 20, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""No layer of the whole width: only what it was built with tells how wide a token is."""
import torch
from torch import nn


class PiecewiseAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.q, self.k, self.v = (nn.Linear(self.width, self.width) for _ in range(3))

    def forward(self, x):
        b, n, d = x.shape
        x = x.view(b, n, self.heads, self.width).transpose(1, 2)
        q, k, v = self.q(x), self.k(x), self.v(x)  # <- heads-share-projection
        scores = q @ k.transpose(-2, -1) / self.width**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d)
