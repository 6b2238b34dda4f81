# regard.check(Attention(24, 3))
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale  # <- scale-by-embed-dim
        attn = dots.softmax(dim=-2)  # <- softmax-wrong-axis
        return self.out(torch.einsum("bhij,bhjd->bihd", attn, v).flatten(2))
