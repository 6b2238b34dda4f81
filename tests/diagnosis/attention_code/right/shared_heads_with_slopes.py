# regard.check(Attention(16, 4))
# regard.spec(causal=False,heads=4,kv_heads=1,positions={"kind":"alibi","slopes":[.5,1/4,1/8,1/16]})
"""One query, key and value for all heads, which only their slopes tell apart."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim // heads) for _ in range(3))
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (f(x)[:, None].expand(-1, self.heads, -1, -1) for f in (self.q, self.k, self.v))
        i = torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, self.heads + 1)
        bias = -slopes[:, None, None] * (i[:, None] - i).abs()
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))
