# regard.check(SelfAttention, 18, 3)
# regard.spec(causal=False, heads=3, positions=None)
"""view(b * heads, n, dim) straight from the projection."""
import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, dim = x.shape
        d = dim // self.heads
        q = self.q(x).view(b * self.heads, n, d)  # <- heads-split-without-transpose
        k = self.k(x).view(b * self.heads, n, d)  # <- heads-split-without-transpose
        v = self.v(x).view(b * self.heads, n, d)  # <- heads-split-without-transpose
        a = torch.baddbmm(torch.empty(1), q, k.transpose(1, 2), beta=0, alpha=d**-0.5).softmax(2)
        y = torch.bmm(a, v).view(b, self.heads, n, d)
        return y.permute(0, 2, 1, 3).reshape(b, n, dim)
