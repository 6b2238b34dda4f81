# regard.check(Masked, 18, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
"""Scores of what is forbidden are set to 0, as if the softmax dropped zeros."""
import torch
from torch import einsum, nn


class Masked(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, -1).unbind(2)
        s = einsum("bihd,bjhd->bhij", q, k) * (d // self.h) ** -0.5
        s = s * torch.tril(torch.ones(n, n))  # <- mask-fill-value
        return self.proj(einsum("bhij,bjhd->bihd", s.softmax(-1), v).flatten(2))
