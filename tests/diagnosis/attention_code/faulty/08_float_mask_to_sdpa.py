# regard.check(Attention, 24, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""A float mask is added; ones and zeros should have been .bool()."""
import torch
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
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mask = torch.tril(torch.ones(t, t))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # <- mask-added-as-numbers
        return self.out(y.transpose(1, 2).reshape(b, t, c))
