# regard.check(Attn, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
"""The scale is computed in __init__ and forgotten in forward."""
import torch
from torch import nn


class Attn(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.scale = (width // n_heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        b, n, w = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.n_heads, w // self.n_heads)
        q, k, v = qkv.unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k)  # <- no-scale
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.proj(torch.einsum("bhij,bjhd->bihd", weights, v).reshape(b, n, w))
