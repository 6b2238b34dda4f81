# regard.check(SpatialAttention, 16, args=(torch.randn(2,16,4,5),))
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class SpatialAttention(nn.Module):
    """Attention over the pixels of a feature map, (batch, channels, height, width) (diffusion UNet)."""

    def __init__(self, channels):
        super().__init__()
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q = self.q(x).reshape(b, c, h * w).permute(0, 2, 1)
        k = self.k(x).reshape(b, c, h * w)
        w_ = torch.bmm(q, k) * c**-0.5
        w_ = torch.softmax(w_, dim=2)
        v = self.v(x).reshape(b, c, h * w)
        h_ = torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w)
        return x + self.proj_out(h_)
