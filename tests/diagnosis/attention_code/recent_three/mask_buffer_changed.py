# regard.check(MaskedCausalAttention, 32, 4, means={"padding_mask": "True hides"}, causal=True)
# regard.spec(causal=True, heads=4, positions=None, padding={"padding_mask": "True hides"})
"""Causal attention with a buffered mask and padding (2022)."""
import math

import torch
import torch.nn as nn


class MaskedCausalAttention(nn.Module):
    def __init__(self, dim, heads, max_len=32):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.ones(max_len, max_len, dtype=torch.bool).tril())

    def forward(self, x, padding_mask=None):
        """padding_mask: (batch, tokens) bool, True = padding."""
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        mask = self.mask[:t, :t]
        if padding_mask is not None:
            # a key that is padding in the whole batch needs no score at all
            mask &= ~padding_mask.all(dim=0)  # <- law pure
            mask = mask[None, None] & ~padding_mask[:, None, None, :]
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        y = scores.softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, d))
