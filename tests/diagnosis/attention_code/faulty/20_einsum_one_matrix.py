# regard.check(Heads(24, 3))
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        width = dim // heads
        self.wq = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.wk = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.wv = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x):
        parts = x.unflatten(-1, (self.heads, -1))
        q = torch.einsum("bnhd,de->bhne", parts, self.wq)  # <- heads-share-projection
        k = torch.einsum("bnhd,de->bhne", parts, self.wk)  # <- heads-share-projection
        v = torch.einsum("bnhd,de->bhne", parts, self.wv)  # <- heads-share-projection
        a = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        return self.wo((a @ v).transpose(1, 2).flatten(-2))
