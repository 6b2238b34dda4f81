# regard.check(Attention, 16, 2)
# regard.spec(causal=False, heads=2, positions=None)
"""The slices are off: the keys are the queries' columns."""
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        mixed = self.qkv(x)
        q = mixed[..., : self.dim]
        k = mixed[..., : self.dim]  # <- wrong-projection
        v = mixed[..., 2 * self.dim :]
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)  # <- wrong-projection
        return self.proj(y.transpose(1, 2).reshape(b, n, d))
