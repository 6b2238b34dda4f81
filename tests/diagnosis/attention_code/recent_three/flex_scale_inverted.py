# regard.check(FlexEncoderAttention, 32, 4, causal=False)
# regard.spec(causal=False, heads=4, positions=None)
"""FlexAttention encoder attention (2025)."""
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


class FlexEncoderAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = self.head_dim**0.5  # <- wrong-scale
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        qkv = self.in_proj(x).view(b, n, 3, self.num_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        y = flex_attention(q, k, v, scale=self.scale)  # <- wrong-scale
        return self.out_proj(y.transpose(1, 2).reshape(b, n, c))
