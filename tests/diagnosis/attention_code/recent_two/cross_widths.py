# regard.check(CrossAttention(32, 24, 4))
# regard.spec(heads=4, positions=None, padding={"mask": "True keeps"})
import torch
from torch import einsum, nn

from einops import rearrange


def exists(val):
    return val is not None


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim, heads=8, dim_head=8):
        super().__init__()
        self.scale = dim_head ** -0.5
        self.heads = heads
        inner_dim = dim_head * heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def forward(self, x, context, mask=None):
        """mask: (batch, context tokens), True = a real token."""
        h = self.heads
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> (b h) n d", h=h), (q, k, v))
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        if exists(mask):
            mask = mask.repeat_interleave(h, dim=0).unsqueeze(1)
            sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = einsum("b i j, b j d -> b i d", attn, v)
        return self.to_out(rearrange(out, "(b h) n d -> b n (h d)", h=h))
