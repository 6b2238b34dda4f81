# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
"""scaled_dot_product_attention wants (batch, heads, tokens, dim)."""
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v)  # <- heads-and-tokens-exchanged
        return self.out(y.reshape(b, t, c))
