# regard.check(Attention, 24, heads=3)
# regard.spec(causal=False, heads=3, positions=None, sinks=True)
import torch
from torch import nn, einsum


class Attention(nn.Module):
    """lucidrains style, with one learned key and value for all (null kv)."""

    def __init__(self, dim, heads=3, dim_head=8):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        inner = heads * dim_head
        self.norm = nn.LayerNorm(dim)
        self.null_kv = nn.Parameter(torch.randn(2, heads, 1, dim_head))
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        b = x.shape[0]
        x = self.norm(x)
        q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        nk, nv = (t.expand(b, -1, -1, -1) for t in self.null_kv)
        k, v = torch.cat((nk, k), dim=-2), torch.cat((nv, v), dim=-2)
        sim = einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))
