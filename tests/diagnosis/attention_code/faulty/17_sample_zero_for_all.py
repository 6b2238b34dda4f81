# regard.check(SelfAttention, 16)
# regard.spec(causal=False, heads=1, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x, attention_mask):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.size(-1) ** 0.5
        keep = attention_mask[0].bool()
        scores = scores.masked_fill(~keep, -1e9)  # <- mask-of-another-sample
        return torch.softmax(scores, dim=-1) @ self.v(x)
