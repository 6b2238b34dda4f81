# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None, scale=regard.ANY)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)
        self.temperature = nn.Parameter(torch.linspace(0.3, 0.9, heads)[:, None, None])

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return (((q @ k.mT) * self.temperature).softmax(-1) @ v).transpose(1, 2).flatten(2)
