# regard.check(SelfAttention, 16)
# regard.spec(causal=False, heads=1, positions=None, padding={"attention_mask": "True keeps"})
"""Rows of padding are uniform averages here, which nobody reads; no NaN."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x, attention_mask):
        pairs = attention_mask[:, :, None].bool() & attention_mask[:, None, :].bool()
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.size(-1) ** 0.5
        scores = scores.masked_fill(~pairs, -1e9)
        return torch.softmax(scores, dim=-1) @ self.v(x)
