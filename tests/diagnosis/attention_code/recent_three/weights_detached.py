# regard.check(VisualSelfAttention, 32, causal=False)
# regard.spec(causal=False, heads=4, positions=None)
"""Attention that keeps its weights for plots (2021)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class VisualSelfAttention(nn.Module):
    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.last_attention = None

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        self.last_attention = attn = attn.detach()  # <- law gradient
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)  # <- law gradient
        return self.proj(x)
