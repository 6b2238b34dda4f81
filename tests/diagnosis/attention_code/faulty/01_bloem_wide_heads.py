# regard.check(SelfAttention, 6, 3)
# regard.spec(causal=False, heads=3, positions=None)
"""Wide heads: each as wide as the embedding; batch and heads in one axis."""
import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, k, heads):
        super().__init__()
        self.heads = heads
        self.to_keys = nn.Linear(k, k * heads, bias=False)
        self.to_queries = nn.Linear(k, k * heads, bias=False)
        self.to_values = nn.Linear(k, k * heads, bias=False)
        self.unify = nn.Linear(k * heads, k)

    def forward(self, x):
        b, t, k = x.size()
        h = self.heads
        queries = self.to_queries(x).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
        keys = self.to_keys(x).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
        values = self.to_values(x).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
        dot = torch.bmm(queries, keys.transpose(1, 2)) / k**0.5
        dot = F.softmax(dot, dim=2)
        out = torch.bmm(dot, values).view(b, t, h * k)  # <- heads-merged-without-transpose
        return self.unify(out)
