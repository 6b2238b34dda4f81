# regard.check(MultiHead(24, 3))
# regard.spec(causal=False, heads=3, positions=None)
"""[module] * n holds one module n times."""
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, d, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, width) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)  # <- heads-share-projection
        return (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1) @ v


class MultiHead(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.heads = nn.ModuleList([Head(d, d // h)] * h)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))
