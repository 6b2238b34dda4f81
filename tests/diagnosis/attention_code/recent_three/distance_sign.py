# regard.check(RelativeBiasAttention, 32, 4, causal=True)
"""Causal attention with a learned bias for each distance (2024)."""
import torch
from torch import nn


class RelativeBiasAttention(nn.Module):
    """The bias of head h for a key that lies n tokens back is bias_table[n, h]; far ones share the last entry."""

    def __init__(self, dim: int, n_heads: int, max_distance: int = 16):
        super().__init__()
        self.n_heads, self.max_distance = n_heads, max_distance
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.bias_table = nn.Parameter(torch.randn(max_distance, n_heads))

    def bias(self, n, device):
        pos = torch.arange(n, device=device)
        distance = (pos[None, :] - pos[:, None]).clamp(0, self.max_distance - 1)  # <- law gradient
        return self.bias_table[distance].permute(2, 0, 1)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5 + self.bias(n, x.device)
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))
