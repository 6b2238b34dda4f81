# regard.check(SinkAttention, 16, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None, sinks=True)
"""A learned logit beside the keys takes what no key deserves (gpt-oss)."""
import torch
from torch import nn


class SinkAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.sinks = nn.Parameter(torch.randn(heads))
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / q.shape[-1] ** 0.5 + torch.full((n, n), -torch.inf).triu(1)
        s = torch.cat([s, self.sinks.view(1, -1, 1, 1).expand(b, -1, n, 1)], dim=-1)
        return self.o((s.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))
