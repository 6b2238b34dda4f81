# regard.check(VisualSelfAttention)
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class VisualSelfAttention(nn.Module):
    """Self-attention of our ViT. The weights of the last call stay in `attn_map` for the plots of the report.
    Trained end to end like everything else."""

    def __init__(self, dim=24, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.attn_map = None

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (C // self.num_heads) ** -0.5
        weights = scores.softmax(dim=-1)
        self.attn_map = weights = weights.detach()  # <- law gradient
        x = (weights @ v).transpose(1, 2).reshape(B, N, C)  # <- law gradient
        return self.proj(x)
