# regard.check(SelfAttention, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / (d // self.heads) ** 0.5
        scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
        flat = scores.reshape(b, self.heads, t * t)
        weights = flat.softmax(-1).reshape(b, self.heads, t, t)  # <- softmax-wrong-axis
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
