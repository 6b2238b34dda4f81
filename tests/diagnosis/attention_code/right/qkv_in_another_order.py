# regard.check(SelfAttention, 16, 2)
# regard.spec(causal=False, heads=2, positions=None)
"""The fused projection gives k, v, q in this order: only names, nothing is mixed up."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.kvq = nn.Linear(channels, channels * 3)

    def forward(self, x):
        b, n, c = x.shape
        k, v, q = self.kvq(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        weights = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).reshape(b, n, c)
