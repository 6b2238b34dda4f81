# regard.check(GroupedQuery, 32, 8, 4)
# regard.spec(causal=False, heads=8, kv_heads=4, positions=None)
"""The key head of query head i is taken as i % kv_heads."""
import torch
from torch import nn


class GroupedQuery(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, dim // heads
        self.q = nn.Linear(dim, heads * self.d)
        self.k = nn.Linear(dim, kv_heads * self.d)
        self.v = nn.Linear(dim, kv_heads * self.d)
        self.o = nn.Linear(heads * self.d, dim)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, self.d))
        k = self.k(x).unflatten(-1, (self.kv_heads, self.d))
        v = self.v(x).unflatten(-1, (self.kv_heads, self.d))
        outs = []
        for i in range(self.heads):
            j = i % self.kv_heads  # <- kv-heads-repeated-in-wrong-order
            w = torch.softmax(q[:, :, i] @ k[:, :, j].mT / self.d**0.5, dim=-1)  # <- kv-heads-repeated-in-wrong-order
            outs.append(w @ v[:, :, j])  # <- kv-heads-repeated-in-wrong-order
        return self.o(torch.cat(outs, dim=-1))
