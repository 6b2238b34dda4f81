# regard.check(RotaryAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","base":1e4,"pairing":"neighbours"})
import torch
import torch.nn.functional as F
from torch import nn


def rotary(x, base=10_000):
    d = x.shape[-1]
    f = base ** (-torch.arange(0, d, 2, device=x.device) / d)
    a = torch.outer(torch.arange(x.shape[-2], device=x.device), f)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * a.cos() - x2 * a.sin(), x1 * a.sin() + x2 * a.cos()), -1).flatten(-2)


class RotaryAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q = rotary(q)
        rotary(k)  # <- law score
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))
