# regard.check(Attention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        p = F.softmax(s)  # <- softmax-wrong-axis
        return self.out(torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2))
