# regard.check(Attention, 16, 2)
# regard.spec(causal=False, heads=2, positions=None)
"""view(-1, ...) makes one long sentence of the whole batch."""
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
        q, k, v = self.qkv(x).view(-1, 3, self.heads, c // self.heads).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q, k, v)  # <- attends-across-batch
        return self.out(y.transpose(0, 1).reshape(b, t, c))
