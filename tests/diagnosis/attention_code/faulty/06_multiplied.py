# regard.check(SelfAttention(16))
# regard.spec(causal=False, heads=1, positions=None)
"""Multiplied with sqrt(d) where it should be divided."""
import math

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d = d
        self.to_qkv = nn.Linear(d, 3 * d, bias=False)

    def forward(self, x):
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        s = q @ k.mT * math.sqrt(self.d)  # <- wrong-scale
        return torch.softmax(s, -1) @ v
