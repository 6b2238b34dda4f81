# regard.check(QwenAttention, 48, 6, 2, causal=True)
# regard.spec(causal=True, heads=6, kv_heads=2, positions=None, qk_norm="rms")
import torch
import torch.nn.functional as F
from torch import nn


class QwenAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.hd = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, heads * self.hd)
        self.k_proj = nn.Linear(dim, kv_heads * self.hd)
        self.v_proj = nn.Linear(dim, kv_heads * self.hd)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.hd), nn.RMSNorm(self.hd)

    def repeat_kv(self, x):
        b, h, t, d = x.shape
        n = self.heads // self.kv_heads
        return x[:, None].expand(b, n, h, t, d).reshape(b, n * h, t, d)  # <- kv-heads-repeated-in-wrong-order

    def forward(self, x):
        b, t, c = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.hd)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.hd)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.hd).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, self.repeat_kv(k), self.repeat_kv(v), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, c))
