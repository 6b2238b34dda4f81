# regard.check(SelfAttention, 16)
# regard.spec(causal=False, heads=1, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def forward(self, x, attention_mask):
        """attention_mask: (batch, tokens), 1 where there is a token"""
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / x.size(-1) ** 0.5
        scores = scores.masked_fill(attention_mask.unsqueeze(-1) == 0, -1e9)  # <- padding-on-queries
        return torch.softmax(scores, dim=-1) @ self.value(x)
