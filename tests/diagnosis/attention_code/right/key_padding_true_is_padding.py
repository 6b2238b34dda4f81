# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"key_padding_mask": "True hides"})
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, key_padding_mask=None):
        """key_padding_mask: (batch, tokens), True for padding"""
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
