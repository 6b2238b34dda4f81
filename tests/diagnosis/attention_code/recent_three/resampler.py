# regard.check(PerceiverResampler, 32, args=(torch.randn(2, 6, 32),))
# regard.spec(heads=4, positions=None)
"""The resampler of Flamingo: a few learned latents read a sequence of visual features."""
import torch
from torch import einsum, nn
from einops import rearrange, repeat


class PerceiverAttention(nn.Module):
    def __init__(self, *, dim, dim_head=8, heads=4):
        super().__init__()
        self.scale = dim_head**-0.5
        self.heads = heads
        inner_dim = dim_head * heads
        self.norm_media = nn.LayerNorm(dim)
        self.norm_latents = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)
        self.to_out = nn.Linear(inner_dim, dim, bias=False)

    def forward(self, x, latents):
        """x: media features (batch, n1, dim); latents: (batch, n2, dim), which also read themselves."""
        x = self.norm_media(x)
        latents = self.norm_latents(latents)
        q = self.to_q(latents)
        kv_input = torch.cat((x, latents), dim=-2)
        k, v = self.to_kv(kv_input).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, k, v))
        q = q * self.scale
        sim = einsum("... i d, ... j d -> ... i j", q, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1)
        out = einsum("... i j, ... j d -> ... i d", attn, v)
        out = rearrange(out, "b h n d -> b n (h d)")
        return self.to_out(out)


class PerceiverResampler(nn.Module):
    def __init__(self, dim, depth=1, num_latents=6, dim_head=8, heads=4):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.layers = nn.ModuleList([PerceiverAttention(dim=dim, dim_head=dim_head, heads=heads) for _ in range(depth)])

    def forward(self, x):
        latents = repeat(self.latents, "n d -> b n d", b=x.shape[0])
        for attn in self.layers:
            latents = attn(x, latents) + latents
        return latents
