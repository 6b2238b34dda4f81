# regard.check(MultiheadAttn, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class MultiheadAttn(nn.Module):
    def __init__(self, dim, heads, p=0.3):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.drop = nn.Dropout(p)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = self.drop(q @ k.mT * q.shape[-1] ** -0.5)  # <- law training
        return self.o((s.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
