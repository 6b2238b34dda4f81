# regard.check(Decoder, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
"""Somebody thought that a mask is a thing of training, like dropout."""
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5  # <- not-causal
        if self.training:
            n = x.size(1)
            scores = scores.masked_fill(torch.ones(n, n).tril() == 0, float("-inf"))
        return torch.softmax(scores, -1) @ self.v(x)  # <- not-causal
