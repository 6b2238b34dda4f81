# regard.check(Attention, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x):
        n = x.size(1)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.size(2) ** 0.5
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("inf"))  # <- mask-fill-value
        return torch.softmax(scores, dim=-1) @ self.v(x)
