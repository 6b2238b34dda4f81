# regard.check(SelfAttention, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1)  # <- no-scale, not-causal
        weights = torch.softmax(scores, dim=-1)  # <- not-causal
        return weights @ self.v(x)
