# regard.check(PatchAttention, args=(torch.randn(2, 3, 8, 12),), causal=False)
# regard.spec(causal=False, heads=4, positions=None)
"""Tiny ViT encoder block on images (2021)."""
import torch
from torch import nn
from einops import rearrange


class Attention(nn.Module):
    def __init__(self, dim, heads=8, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.scale = dim**-0.5  # <- scale-by-embed-dim
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        qkv = self.to_qkv(x)
        q, k, v = rearrange(qkv, "b n (qkv h d) -> qkv b h n d", qkv=3, h=self.heads)
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale  # <- scale-by-embed-dim
        attn = dots.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        out = rearrange(out, "b h n d -> b n (h d)")
        return self.to_out(out)


class PatchAttention(nn.Module):
    """(batch, 3, height, width) -> (batch, patches, dim)"""

    def __init__(self, patch=4, dim=32, heads=4):
        super().__init__()
        self.patchify = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.norm = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)

    def forward(self, images):
        x = self.patchify(images).flatten(2).transpose(1, 2)
        return x + self.attn(self.norm(x))
