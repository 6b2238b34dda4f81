# regard.check(SelfAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
"""Megatron's way: the scale goes into baddbmm's alpha, batch and heads in one axis."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x):
        b, n, d = x.shape
        mixed = self.query_key_value(x).view(b, n, self.heads, 3 * self.head_dim)
        q, k, v = mixed.transpose(1, 2).reshape(b * self.heads, n, -1).chunk(3, dim=-1)
        scores = torch.baddbmm(
            torch.zeros(b * self.heads, n, n), q, k.transpose(1, 2), beta=0.0, alpha=self.head_dim**-0.5
        )
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -10000.0)
        y = torch.bmm(scores.softmax(-1), v).view(b, self.heads, n, self.head_dim)
        return self.dense(y.transpose(1, 2).flatten(2))
