# regard.check(Attention, 24, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q, self.k, self.v = (nn.Linear(self.hd, self.hd) for _ in range(3))
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        x = x.view(b, n, self.heads, self.hd)
        q = self.q(x).transpose(1, 2)  # <- heads-share-projection
        k = self.q(x).transpose(1, 2)  # <- wrong-projection, heads-share-projection
        v = self.v(x).transpose(1, 2)  # <- heads-share-projection
        a = torch.softmax(q @ k.transpose(-2, -1) / self.hd**0.5, dim=-1)  # <- wrong-projection
        return self.o((a @ v).transpose(1, 2).reshape(b, n, d))
