# regard.check(SelfAttention(16))
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x):
        batch, seq_len, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.einsum("itd,jtd->tij", q, k) / self.dim**0.5  # <- attends-across-batch
        weights = scores.softmax(dim=-1)
        out = torch.einsum("tij,jtd->itd", weights, v)
        assert out.shape == (batch, seq_len, self.dim)
        return out
