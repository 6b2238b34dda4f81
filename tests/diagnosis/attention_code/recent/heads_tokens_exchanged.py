# regard.check(FusedAttention, 32, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class FusedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.Wqkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.Wqkv(x).view(b, t, 3, self.heads, self.hd)
        q, k, v = qkv.unbind(dim=2)
        y = F.scaled_dot_product_attention(q, k, v)  # <- heads-and-tokens-exchanged
        return self.out(y.reshape(b, t, d))
