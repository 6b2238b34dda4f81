# regard.check(GroupedAttention, 48, 6, 2, causal=True)
# regard.spec(causal=True, heads=6, kv_heads=2, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class GroupedAttention(nn.Module):
    def __init__(self, dim, n_heads, n_kv):
        super().__init__()
        self.n_heads, self.n_kv, self.hd = n_heads, n_kv, dim // n_heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, n_kv * self.hd)
        self.v = nn.Linear(dim, n_kv * self.hd)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.n_heads, self.hd).transpose(1, 2)
        k = self.k(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        v = self.v(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        k = k.repeat_interleave(self.n_heads // self.n_kv, dim=1)
        v = v.repeat(1, self.n_heads // self.n_kv, 1, 1)  # <- law heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, d))
