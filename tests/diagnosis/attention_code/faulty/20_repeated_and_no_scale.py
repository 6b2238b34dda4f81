# regard.check(Attention(16, 4), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""As many columns in a head as there are heads."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v = (nn.Linear(d, d // h) for _ in range(3))
        self.out = nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q(x)[:, None].expand(b, self.h, t, -1)  # <- heads-share-projection
        k = self.k(x)[:, None].expand(b, self.h, t, -1)
        v = self.v(x)[:, None].expand(b, self.h, t, -1)
        scores = q @ k.mT  # <- no-scale
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
