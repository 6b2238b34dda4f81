# regard.check(LatentAttention, 40, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","pairing":"neighbours","part":0.5})
import torch
import torch.nn as nn


class LatentAttention(nn.Module):
    def __init__(self, dim, h=4, rank=16, nope=8, pe=8, v_dim=8):
        super().__init__()
        self.h, self.nope, self.pe, self.v_dim, self.rank = h, nope, pe, v_dim, rank
        self.wq = nn.Linear(dim, h * (nope + pe), bias=False)
        self.wkv_a = nn.Linear(dim, rank + pe, bias=False)
        self.wkv_b = nn.Linear(rank, h * (nope + v_dim), bias=False)
        self.wo = nn.Linear(h * v_dim, dim, bias=False)
        self.softmax_scale = nope**-0.5  # <- law score

    def rope(self, x):
        inv = 10000.0 ** (-torch.arange(0, self.pe, 2, device=x.device) / self.pe)
        a = (torch.arange(x.shape[1], device=x.device)[:, None] * inv)[None, :, None]
        x0, x1 = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((x0 * a.cos() - x1 * a.sin(), x0 * a.sin() + x1 * a.cos()), -1).flatten(-2)

    def forward(self, x):
        b, t, _ = x.shape
        q_nope, q_pe = self.wq(x).view(b, t, self.h, -1).split([self.nope, self.pe], -1)
        latent, k_pe = self.wkv_a(x).split([self.rank, self.pe], -1)
        k_nope, v = self.wkv_b(latent).view(b, t, self.h, -1).split([self.nope, self.v_dim], -1)
        q_pe, k_pe = self.rope(q_pe), self.rope(k_pe[:, :, None])
        s = torch.einsum("bqhd,bkhd->bhqk", q_nope, k_nope)
        s = s + torch.einsum("bqhd,bkd->bhqk", q_pe, k_pe.squeeze(2))
        s = s * self.softmax_scale
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).flatten(2))
