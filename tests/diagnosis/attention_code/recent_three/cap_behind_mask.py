# regard.check(CappedCausalAttention, 32, 4, 5.0, causal=True)
"""Grok/Gemma style capped logits (2024)."""
import torch
import torch.nn as nn


class CappedCausalAttention(nn.Module):
    def __init__(self, dim, n_heads, attn_logit_softcapping=20.0):
        super().__init__()
        self.n_heads = n_heads
        self.cap = attn_logit_softcapping
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.n_heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) * (d // self.n_heads) ** -0.5
        mask = torch.full((t, t), torch.finfo(x.dtype).min, device=x.device, dtype=x.dtype).triu(1)
        scores = scores + mask
        scores = self.cap * torch.tanh(scores / self.cap)  # <- law influence
        y = scores.softmax(dim=-1) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))
