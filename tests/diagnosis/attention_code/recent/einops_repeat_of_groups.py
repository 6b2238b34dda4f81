# regard.check(GQA)
# regard.spec(causal=False, heads=4, kv_heads=2, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat


class GQA(nn.Module):
    def __init__(self, dim=32, query_heads=4, kv_heads=2):
        super().__init__()
        self.query_heads, self.kv_heads = query_heads, kv_heads
        d = dim // query_heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, kv_heads * d)
        self.v_proj = nn.Linear(dim, kv_heads * d)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        q = rearrange(self.q_proj(x), "b n (h d) -> b h n d", h=self.query_heads)
        k = rearrange(self.k_proj(x), "b n (h d) -> b h n d", h=self.kv_heads)
        v = rearrange(self.v_proj(x), "b n (h d) -> b h n d", h=self.kv_heads)
        g = self.query_heads // self.kv_heads
        k = repeat(k, "b h n d -> b (g h) n d", g=g)  # <- kv-heads-repeated-in-wrong-order
        v = repeat(v, "b h n d -> b (g h) n d", g=g)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(rearrange(out, "b h n d -> b n (h d)"))
