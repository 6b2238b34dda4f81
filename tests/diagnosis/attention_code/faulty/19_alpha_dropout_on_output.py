# regard.check(Attention, 16, 2)
# regard.spec(causal=False, heads=2, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        y = self.o(y.transpose(1, 2).reshape(b, n, d))
        return F.dropout(y, 0.1, training=True)  # <- dropout-in-eval
