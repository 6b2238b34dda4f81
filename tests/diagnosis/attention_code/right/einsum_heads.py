# regard.check(Attention, dim=18, heads=3)
# regard.spec(causal=False, heads=3, positions=None)
"""No transpose anywhere: einsum names the axes."""
import torch
from torch import einsum, nn


class Attention(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).reshape(b, n, self.heads, -1) for f in (self.to_q, self.to_k, self.to_v))
        sim = einsum("b i h d, b j h d -> b h i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b j h d -> b i h d", attn, v)
        return self.to_out(out.reshape(b, n, d))
