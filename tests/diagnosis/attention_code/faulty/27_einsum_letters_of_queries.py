# regard.check(Attention, 16)
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = torch.softmax(torch.einsum("bqd,bkd->bqk", q, k) / 4, dim=-1)
        return torch.einsum("bqk,bqd->bkd", weights, v)  # <- values-mixed-along-wrong-axis
