# regard.check(Attention, 12, 3)
# regard.spec(causal=False, heads=3, positions=None)
"""1 x 1 convolutions are linear layers."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Conv1d(dim, 3 * dim, kernel_size=1, bias=False)
        self.out = nn.Conv1d(dim, dim, kernel_size=1)

    def forward(self, x):
        """x: (batch, tokens, dim)"""
        q, k, v = self.qkv(x.transpose(1, 2)).chunk(3, dim=1)
        q, k, v = (t.unflatten(1, (self.heads, -1)) for t in (q, k, v))  # (b, h, d, n)
        sim = torch.einsum("bhdi,bhdj->bhij", q, k) * q.shape[2] ** -0.5
        out = torch.einsum("bhij,bhdj->bhdi", sim.softmax(dim=-1), v)
        return self.out(out.flatten(1, 2)).transpose(1, 2)
