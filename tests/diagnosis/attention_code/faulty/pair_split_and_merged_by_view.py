# regard.check(MultiHeadAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
"""No transpose at all: each head gets a quarter of the tokens, whole."""
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q = self.q(x).view(b, self.heads, n, d // self.heads)  # <- heads-split-without-transpose
        k = self.k(x).view(b, self.heads, n, d // self.heads)  # <- heads-split-without-transpose
        v = self.v(x).view(b, self.heads, n, d // self.heads)  # <- heads-split-without-transpose
        w = torch.softmax(q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5, dim=-1)
        return self.o((w @ v).view(b, n, d))  # <- heads-merged-without-transpose
