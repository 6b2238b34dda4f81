# regard.check(PerceiverAttention(dim=32), args=(torch.randn(2, 7, 32),))
# regard.spec(heads=4, positions=None)
import torch
from torch import nn


class PerceiverAttention(nn.Module):
    """Learned latents read the tokens."""

    def __init__(self, *, dim, num_latents=3, dim_head=8, heads=4):
        super().__init__()
        self.scale = dim_head ** -0.5
        self.heads = heads
        inner_dim = dim_head * heads
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.norm_media = nn.LayerNorm(dim)
        self.norm_latents = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)
        self.to_out = nn.Linear(inner_dim, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        latents = self.norm_latents(self.latents).unsqueeze(0).expand(b, -1, -1)
        x = self.norm_media(x)
        q = self.to_q(latents)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        sim = (q * self.scale) @ k.transpose(-2, -1)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1)
        out = (attn @ v).transpose(1, 2).flatten(2)
        return self.to_out(out)
