# regard.check(SelfAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
"""The embedding is cut into heads first, and one small layer projects every piece."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, emb, heads):
        super().__init__()
        self.heads = heads
        s = emb // heads
        self.tokeys = nn.Linear(s, s, bias=False)
        self.toqueries = nn.Linear(s, s, bias=False)
        self.tovalues = nn.Linear(s, s, bias=False)
        self.unifyheads = nn.Linear(emb, emb)

    def forward(self, x):
        b, t, e = x.size()
        h = self.heads
        x = x.view(b, t, h, e // h)
        keys = self.tokeys(x).transpose(1, 2)  # <- heads-share-projection
        queries = self.toqueries(x).transpose(1, 2)  # <- heads-share-projection
        values = self.tovalues(x).transpose(1, 2)  # <- heads-share-projection
        dot = torch.matmul(queries, keys.transpose(2, 3)) / (e // h) ** 0.5
        out = torch.matmul(dot.softmax(dim=3), values)
        return self.unifyheads(out.transpose(1, 2).reshape(b, t, e))
