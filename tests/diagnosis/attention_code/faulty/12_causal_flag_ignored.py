# regard.check(Attention, 16, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1)) if self.causal else None
        return self.attn(x, x, x, need_weights=False)[0]  # <- not-causal
