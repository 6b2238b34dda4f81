# regard.check(CrossAttention(32, 24, heads=4))
# regard.spec(heads=4, positions=None)
import torch
from torch import nn

from einops import rearrange


class CrossAttention(nn.Module):
    def __init__(self, dim, context_dim, heads=4):
        super().__init__()
        self.heads = heads
        self.scale = dim ** -0.5  # <- scale-by-embed-dim
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(context_dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context):
        q, k, v = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, k, v))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))
