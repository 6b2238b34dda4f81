# regard.check(MaskedAttention, 16)
# regard.spec(causal=False, heads=1, positions=None, padding={"mask": "True keeps"})
import torch
import torch.nn as nn


class MaskedAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, mask):
        """mask: (batch, tokens) bool, True = real token; a text may be empty"""
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        pair = mask[:, :, None] & mask[:, None, :]
        scores = scores.masked_fill(~pair, float("-inf"))  # <- nan-rows
        return scores.softmax(dim=-1) @ v
