# regard.check(NonLocalBlock, 16, args=(torch.randn(2, 16, 3, 5),), causal=False)
# regard.spec(causal=False, heads=1, positions=None)
"""Non-local block: attention over the pixels of an image batch (2020)."""
import torch
import torch.nn as nn


class NonLocalBlock(nn.Module):
    def __init__(self, channels, inner=None):
        super().__init__()
        inner = inner or channels // 2
        self.inner = inner
        self.theta = nn.Conv2d(channels, inner, 1)
        self.phi = nn.Conv2d(channels, inner, 1)
        self.g = nn.Conv2d(channels, inner, 1)
        self.out = nn.Conv2d(inner, channels, 1)

    def forward(self, x):
        """x: (batch, channels, height, width); every pixel reads all pixels of its image"""
        b, c, h, w = x.shape
        q = self.theta(x).view(b, self.inner, h * w).permute(0, 2, 1)
        k = self.phi(x).view(b, self.inner, h * w)
        v = self.g(x).view(b, h * w, self.inner)  # <- law mixture
        attn = torch.softmax(torch.bmm(q, k) * self.inner**-0.5, dim=-1)
        y = torch.bmm(attn, v).permute(0, 2, 1).reshape(b, self.inner, h, w)
        return x + self.out(y)
