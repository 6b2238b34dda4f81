# regard.check(MLA, 40, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","pairing":"neighbours","part":1/3})
import torch
import torch.nn as nn
import torch.nn.functional as F


def rope(x, base=10000.0):
    # x: (b, t, h, d); pairs (0, 1), (2, 3), ...
    t, d = x.shape[1], x.shape[-1]
    inv = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    ang = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * inv
    cos, sin = ang.cos()[None, :, None].to(x.dtype), ang.sin()[None, :, None].to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class MLA(nn.Module):
    """Multi-head latent attention: keys and values from one small latent; decoupled rotary part."""

    def __init__(self, dim, n_heads=4, kv_rank=16, nope=8, rope_dim=4, v_dim=8):
        super().__init__()
        self.h, self.nope, self.r, self.v_dim, self.rank = n_heads, nope, rope_dim, v_dim, kv_rank
        self.wq = nn.Linear(dim, n_heads * (nope + rope_dim), bias=False)
        self.wkv_a = nn.Linear(dim, kv_rank + rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank)
        self.wkv_b = nn.Linear(kv_rank, n_heads * (nope + v_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_dim, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.h, -1)
        q = torch.cat((q[..., : self.nope], rope(q[..., self.nope :])), dim=-1)
        latent, k_pe = self.wkv_a(x).split([self.rank, self.r], dim=-1)
        k_pe = rope(k_pe.unsqueeze(2)).expand(-1, -1, self.h, -1)
        kv = self.wkv_b(self.kv_norm(latent)).view(b, t, self.h, -1)
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        k = torch.cat((k_nope, k_pe), dim=-1)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))
