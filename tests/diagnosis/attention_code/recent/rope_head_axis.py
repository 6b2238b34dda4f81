# regard.check(RoFormerAttention, 32, 4)
# regard.spec(causal=False, heads=4, positions={"kind": "rotary", "base": 1e4, "pairing": "halves"})
import torch
from torch import nn


class RoFormerAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("freq", 10000 ** (-torch.arange(0, self.hd, 2) / self.hd))

    def rope(self, x):
        # x: (b, h, t, d)
        seq = torch.arange(x.shape[1], device=x.device)  # <- law positions
        ang = seq[:, None, None] * self.freq
        a, b = x.chunk(2, -1)
        return torch.cat((a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()), -1)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        w = (self.rope(q) @ self.rope(k).mT * self.hd**-0.5).softmax(-1)
        return self.out((w @ v).transpose(1, 2).reshape(b, t, d))
