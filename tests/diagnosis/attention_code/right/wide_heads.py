# regard.check(SelfAttention, 6, 3)
# regard.spec(causal=False, heads=3, positions=None)
"""Each head as wide as the embedding; queries and keys share the scale: a fourth root each."""
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
        dot = torch.bmm(queries / k**0.25, (keys / k**0.25).transpose(1, 2))
        out = torch.bmm(F.softmax(dot, dim=2), values).view(b, h, t, k)
        return self.unify(out.transpose(1, 2).reshape(b, t, h * k))
