# regard.check(CausalAttention, 24, 2, causal=True)
# regard.spec(causal=True, heads=2, positions={"kind": "rotary", "base": 1e4, "pairing": "halves"})
import torch
from torch import nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Rotary, cache as a list [keys, values]; keys are cached after the rotation."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.in_proj = nn.Linear(dim, dim * 3, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def rotate(self, x, start):
        n = x.shape[-2]
        half = self.hd // 2
        freq = 1e4 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(start, start + n, device=x.device)[:, None] * freq
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    def forward(self, x, kv_cache=None):
        b, n, d = x.shape
        q, k, v = self.in_proj(x).view(b, n, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        start = 0 if kv_cache is None else kv_cache[0].shape[-2]
        q, k = self.rotate(q, start), self.rotate(k, start)
        if kv_cache is not None:
            k, v = torch.cat([kv_cache[0], k], -2), torch.cat([kv_cache[1], v], -2)
        mask = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, d)), [k, v]
