# regard.check(RopeAttention, 32, 4, args=(torch.randn(2,7,32), torch.stack([torch.arange(7), torch.arange(7)*2])), causal=True)
# regard.spec(causal=True, heads=4, positions={"kind": "rotary", "base": 1e4, "pairing": "halves"})
import torch
import torch.nn.functional as F
from torch import nn


class RopeAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def rope(self, x, position_ids):
        freq = 10000 ** (-torch.arange(0, self.hd, 2, device=x.device) / self.hd)
        ang = (position_ids[0, :, None] * freq).repeat(1, 2)  # <- law samples
        half = torch.cat((-x[..., self.hd // 2 :], x[..., : self.hd // 2]), -1)
        return x * ang.cos() + half * ang.sin()

    def forward(self, x, position_ids):
        """position_ids: (batch, tokens) int64"""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        q, k = self.rope(q, position_ids), self.rope(k, position_ids)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, d))
