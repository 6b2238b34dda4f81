# regard.check(CausalCosineAttention, 32, 4, causal=True)
"""Causal cosine attention, L2-normalised queries and keys (2023)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalCosineAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), 10.0))

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = F.normalize(q, dim=-2), F.normalize(k, dim=-2)  # <- law influence
        attn = (q @ k.transpose(-2, -1)) * self.logit_scale
        future = torch.ones(N, N, dtype=torch.bool, device=x.device).triu(1)
        attn = attn.masked_fill(future, float("-inf")).softmax(dim=-1)
        out = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(out)
