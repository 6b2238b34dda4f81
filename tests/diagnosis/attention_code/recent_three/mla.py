# regard.check(MultiHeadLatentAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","pairing":"halves","part":4/12})
"""Multi-head latent attention (DeepSeek-V2), without weight absorption."""
import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rope(x, theta=10000.0):
    """x: (batch, heads, tokens, dim)"""
    T, d = x.shape[-2:]
    inv = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=x.dtype) / d)
    ang = torch.arange(T, device=x.device, dtype=x.dtype)[:, None] * inv
    cos, sin = ang.cos(), ang.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MultiHeadLatentAttention(nn.Module):
    def __init__(self, dim, n_heads, kv_lora_rank=16, q_lora_rank=24, nope_dim=8, rope_dim=4, v_dim=8):
        super().__init__()
        self.n_heads, self.nope_dim, self.rope_dim, self.v_dim = n_heads, nope_dim, rope_dim, v_dim
        self.kv_lora_rank = kv_lora_rank
        self.scale = (nope_dim + rope_dim) ** -0.5
        self.wq_a = nn.Linear(dim, q_lora_rank, bias=False)
        self.q_norm = RMSNorm(q_lora_rank)
        self.wq_b = nn.Linear(q_lora_rank, n_heads * (nope_dim + rope_dim), bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + rope_dim, bias=False)
        self.kv_norm = RMSNorm(kv_lora_rank)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (nope_dim + v_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_dim, dim, bias=False)

    def forward(self, x):
        """Causal; x: (batch, tokens, dim)."""
        B, T, _ = x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(B, T, self.n_heads, -1).transpose(1, 2)
        q_nope, q_pe = q.split([self.nope_dim, self.rope_dim], dim=-1)
        kv, k_pe = self.wkv_a(x).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(B, T, self.n_heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope_dim, self.v_dim], dim=-1)
        q_pe, k_pe = rope(q_pe), rope(k_pe.unsqueeze(1))

        scores = (q_nope @ k_nope.transpose(-1, -2) + q_pe @ k_pe.transpose(-1, -2)) * self.scale
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out = (probs @ v).transpose(1, 2).reshape(B, T, -1)
        return self.wo(out)
