# regard.check(CausalAttention, 16, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=2)
        q = q.view(b, t, self.heads, -1).transpose(1, 2)
        k = k.view(b, t, self.heads, -1).transpose(1, 2)
        v = v.view(b, t, self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / q.size(-1) ** 0.5
        scores = scores.masked_fill(torch.triu(torch.ones(t, t), 1).bool(), -1e9)
        weights = F.softmax(scores, dim=2)  # <- softmax-wrong-axis
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))
