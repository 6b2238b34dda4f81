# regard.check(Attention, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
"""Two projections, of queries and keys alone."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, cache=None):
        scores = self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5
        keep = torch.ones(x.shape[1], x.shape[1]).tril()
        weights = scores.masked_fill(keep == 0, float("-inf")).softmax(-1)
        return weights @ x  # <- wrong-values
