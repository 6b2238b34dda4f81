# regard.check(Attention, 24, 4)
# regard.spec(causal=False, heads=4, positions=None)
"""The queries are scaled, and then scaled_dot_product_attention scales again."""
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        head_dim = d // self.heads
        q = self.q(x).view(b, n, self.heads, head_dim).transpose(1, 2) * head_dim**-0.5  # <- wrong-scale
        k, v = self.kv(x).view(b, n, 2, self.heads, head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)  # <- wrong-scale
        return self.o(y.transpose(1, 2).reshape(b, n, d))
