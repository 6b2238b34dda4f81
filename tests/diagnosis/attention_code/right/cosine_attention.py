# regard.check(CosineAttention(16))
# regard.spec(causal=False, heads=1, positions=None, scale=regard.ANY, qk_norm="l2")
"""Swin v2: cosines, and a temperature that is learned."""
import torch
import torch.nn.functional as F
from torch import nn


class CosineAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.temperature = nn.Parameter(torch.tensor(2.3))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return torch.softmax(cosines * self.temperature.exp(), dim=-1) @ v
