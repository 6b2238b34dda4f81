# regard.check(CausalRotaryAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions={"kind": "rotary", "base": 1e4, "pairing": "halves"})
import torch
import torch.nn.functional as F
from torch import nn


class CausalRotaryAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.in_proj = nn.Linear(dim, dim * 3, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def rotate(self, x):
        n, half = x.shape[-2], self.hd // 2
        freq = 1e4 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(n, device=x.device)[:, None] * freq  # <- law cache
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    def forward(self, x, past=None):
        b, n, d = x.shape
        q, k, v = self.in_proj(x).view(b, n, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        q, k = self.rotate(q), self.rotate(k)
        if past is not None:
            k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
        start = k.shape[-2] - n
        mask = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, d)), (k, v)
