# regard.check(Attention, 24, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"attention_mask": "True keeps"})
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, attention_mask):
        bias = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, -1e9)
        bias = bias[:, None, :, None]  # <- padding-on-queries
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5 + bias  # <- padding-on-queries
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
