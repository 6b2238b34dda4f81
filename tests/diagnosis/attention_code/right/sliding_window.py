# regard.check(LocalAttention, 16, 2, causal=True)
# regard.spec(causal=True, window=3, heads=2, positions=None)
import torch
from torch import nn


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, window=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n)
        back = i[:, None] - i
        keep = (back >= 0) & (back < self.window)
        scores = (q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5).masked_fill(~keep, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
