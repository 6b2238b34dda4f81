# regard.check(AttnBlock, ch=16, args=(torch.randn(2, 16, 3, 4),))
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class AttnBlock(nn.Module):
    """Attention over the pixels of a feature map, (b, c, h, w), as in DDPM."""

    def __init__(self, ch=16):
        super().__init__()
        self.q = nn.Conv2d(ch, ch, 1)
        self.k = nn.Conv2d(ch, ch, 1)
        self.v = nn.Conv2d(ch, ch, 1)
        self.proj_out = nn.Conv2d(ch, ch, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q = self.q(x).reshape(b, c, h * w).permute(0, 2, 1)
        k = self.k(x).permute(0, 2, 3, 1).reshape(b, c, h * w)  # <- keys-not-transposed
        w_ = torch.bmm(q, k) * (int(c) ** (-0.5))
        w_ = torch.softmax(w_, dim=2)
        v = self.v(x).reshape(b, c, h * w)
        h_ = torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w)
        return x + self.proj_out(h_)
