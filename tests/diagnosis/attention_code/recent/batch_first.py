# regard.check(TabularBlock, 16, 2)
# regard.spec(causal=False, heads=2, positions=None)
import torch
from torch import nn


class TabularBlock(nn.Module):
    """x: (batch, tokens, dim)"""

    def __init__(self, dim, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads)

    def forward(self, x):
        out, _ = self.attn(x, x, x, need_weights=False)  # <- attends-across-batch
        return out
