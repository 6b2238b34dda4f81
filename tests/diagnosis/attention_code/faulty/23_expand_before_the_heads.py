# regard.check(Attention(32, heads=8, kv_heads=2))
# regard.spec(causal=False, heads=8, kv_heads=2, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, kv_heads * self.d)
        self.v = nn.Linear(dim, kv_heads * self.d)
        self.o = nn.Linear(dim, dim)

    def spread(self, x):
        b, n, _ = x.shape
        x = x.view(b, n, 1, self.kv_heads, self.d)
        x = x.expand(b, n, self.heads // self.kv_heads, self.kv_heads, self.d)  # <- kv-heads-repeated-in-wrong-order
        return x.reshape(b, n, self.heads, self.d)  # <- kv-heads-repeated-in-wrong-order

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, self.d)
        k, v = self.spread(self.k(x)), self.spread(self.v(x))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).div(self.d**0.5).softmax(-1)
        return self.o(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))
