# regard.check(Block, 16, 4)
# regard.spec(causal=False, heads=4, positions="learned")
"""The positions say where the tokens are: along axis 1. The attention runs along axis 0."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads, longest=50):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(longest, dim))
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads)  # <- attends-across-batch

    def forward(self, x):
        batch, tokens, dim = x.shape
        x = x + self.positions[:tokens]
        y = self.norm(x)
        out, _ = self.attn(y, y, y)  # <- attends-across-batch
        return x + out
