# regard.check(FrozenKeys, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class FrozenKeys(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        split = lambda z: z.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, v = split(self.q(x)), split(self.v(x))
        with torch.no_grad():
            k = split(self.k(x))  # <- law gradient
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))
