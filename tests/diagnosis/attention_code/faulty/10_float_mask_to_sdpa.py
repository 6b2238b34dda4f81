# regard.check(Attention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1).bool(), -1e-9)  # <- mask-fill-value
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # <- mask-fill-value
        return self.o(y.transpose(1, 2).flatten(2))
