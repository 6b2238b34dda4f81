# regard.check(RotaryAttention, 16, 2, causal=True)
# regard.spec(causal=True,heads=2,positions={"kind":"rotary","base":10000,"pairing":"neighbours"})
import torch
import torch.nn.functional as F
from torch import nn


def turn(x):
    n, d = x.shape[-2:]
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class RotaryAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))
