# regard.check(Attention(24, 2))
# regard.spec(causal=False, heads=2, positions=None)
"""It makes itself half, and what it takes."""
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)
        self.half()

    def forward(self, x):
        b, t, d = x.shape
        x = x.to(torch.float16)
        q, k, v = self.qkv(x).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).float()
