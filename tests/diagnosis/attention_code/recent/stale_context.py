# regard.check(CachedCrossAttention, 24, args=(torch.randn(2,5,24), torch.randn(2,7,24)))
# regard.spec(heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class CachedCrossAttention(nn.Module):
    """Keys and values of the context are computed once, for all steps of the decoder."""

    def __init__(self, dim, heads=3):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.cached = None

    def forward(self, x, context):
        split = lambda z: z.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.cached is None:
            self.cached = tuple(split(z) for z in self.kv(context).chunk(2, -1))  # <- law pure
        k, v = self.cached
        y = F.scaled_dot_product_attention(split(self.q(x)), k, v)
        return self.out(y.transpose(1, 2).flatten(2))
