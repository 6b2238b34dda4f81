# regard.check(Block, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class Block(nn.Module):
    """nn.MultiheadAttention wants True where one may NOT look."""

    def __init__(self, width, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True, dropout=0.2)

    def forward(self, x):
        n = x.size(1)
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        out, _ = self.attn(x, x, x, attn_mask=future, need_weights=False)
        return out
