# regard.check(WindowAttention(16, 6, 4), args=(torch.randn(4, 6, 16),), causal=False)
# regard.spec(causal=False, heads=4, positions="table")
import torch
from torch import nn


class WindowAttention(nn.Module):
    def __init__(self, dim, length, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.table = nn.Parameter(torch.randn(2 * length - 1, num_heads))
        coords = torch.arange(length)
        self.register_buffer("index", coords[:, None] - coords[None, :] + length - 1)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + self.table[self.index.view(-1)].view(self.num_heads, N, N)  # <- law heads
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))
