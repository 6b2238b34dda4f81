# regard.check(CausalAttention, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, max_len=40):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.mask = torch.tril(torch.ones(max_len, max_len))

    def forward(self, x):
        n, d = x.shape[-2:]
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / d**0.5
        scores = scores + self.mask[:n, :n]  # <- mask-added-as-numbers
        return torch.softmax(scores, dim=-1) @ self.v(x)
