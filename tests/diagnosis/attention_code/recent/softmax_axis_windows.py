# regard.check(WindowMSA, 24, num_heads=3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class WindowMSA(nn.Module):
    """x: (windows, tokens, dim)"""

    def __init__(self, dim, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.soft = nn.Softmax(dim=-2)  # <- softmax-wrong-axis

    def forward(self, x):
        w, n, c = x.shape
        q, k, v = self.qkv(x).view(w, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dots = torch.einsum("whid,whjd->whij", q, k) * (c // self.num_heads) ** -0.5
        attn = self.soft(dots)
        return self.proj(torch.einsum("whij,whjd->wihd", attn, v).flatten(2))
