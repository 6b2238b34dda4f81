# regard.check(SelfAttentionBlock, 24, heads=3)
# regard.spec(causal=False, heads=3, positions=None, padding={"padding_mask": "True hides"})
import torch
from torch import nn


class SelfAttentionBlock(nn.Module):
    """Pre-norm residual block.

    padding_mask: (batch, tokens) bool, True = padding
    """

    def __init__(self, dim, heads=3):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True, dropout=0.1)

    def forward(self, x, padding_mask=None):
        y = self.norm(x)
        y, _ = self.attn(y, y, y, key_padding_mask=padding_mask, need_weights=False)
        return x + y
