# regard.check(CrossModal, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class CrossModal(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(dim, dim)
        self.wk = nn.Linear(dim, dim)
        self.wv = nn.Linear(dim, dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q = self.wq(x).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.wk(x).view(b, t, self.heads, -1).transpose(1, 2)
        v = self.wk(x).view(b, t, self.heads, -1).transpose(1, 2)  # <- wrong-projection
        p = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        return self.wo((p @ v).transpose(1, 2).reshape(b, t, d))
