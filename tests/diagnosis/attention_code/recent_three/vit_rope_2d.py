# regard.check(VisionAttention, 32, 4, args=(torch.randn(2, 12, 32), *rope_2d(3, 4, 8)), causal=False)
# regard.spec(causal=False, heads=4, positions={"kind": "rotary", "pairing": "halves"})
"""A vision attention with 2D rotary (2025): cos and sin of the patches are computed outside."""
import torch
from torch import nn
import torch.nn.functional as F


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def rope_2d(height, width, head_dim, theta=100.0):
    """Tables cos, sin of shape (height * width, head_dim)."""
    inv = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))
    y, x = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    angles = torch.cat([y.reshape(-1, 1) * inv, x.reshape(-1, 1) * inv], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class VisionAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden_states, cos, sin):
        """hidden_states: (batch, patches, dim); cos, sin: (patches, head_dim)."""
        b, n, _ = hidden_states.shape
        q, k, v = self.qkv(hidden_states).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(b, n, -1))
