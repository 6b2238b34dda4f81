# regard.check(Attention, 16, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions={"kind":"rotary", "pairing":"neighbours"})
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, 32), nn.Linear(dim, 16), nn.Linear(dim, 16)
        self.o = nn.Linear(32, dim)

    def turned(self, t):
        angles = torch.outer(torch.arange(t.shape[1]), 1e4 ** (-torch.arange(0, 8, 2) / 8))
        c, s = angles.cos()[:, None], angles.sin()[:, None]
        a, b = t[..., ::2], t[..., 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        q, k = self.turned(q), self.turned(k)
        k, v = (t.repeat(1, 1, 2, 1) for t in (k, v))  # <- kv-heads-repeated-in-wrong-order
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
