# regard.check(Encoder, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, key_padding_mask=None):
        """key_padding_mask: (batch, tokens), True for padding, as nn.MultiheadAttention has it"""
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        s = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        if key_padding_mask is not None:
            s = s.masked_fill(~key_padding_mask[:, None, None, :], -1e9)  # <- mask-inverted
        return self.o((s.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
