# regard.check(RotaryAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind": "rotary", "base": 100.0})
import torch
import torch.nn.functional as F
from torch import nn


class RotaryAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def rope(self, x):
        t = x.shape[-2]
        freq = 100 ** (-torch.arange(0, self.hd, 2, device=x.device) / self.hd)
        ang = torch.outer(torch.arange(t, device=x.device), freq)
        cos, sin = torch.cat((ang, ang), -1).cos(), torch.cat((ang, ang), -1).sin()
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin  # <- law positions

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))
