# regard.check(SelfAttention, 12)
# regard.spec(causal=False, heads=1, positions=None)
"""Copied a line and changed only half of it."""
import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query = nn.Linear(d, d)
        self.key = nn.Linear(d, d)
        self.value = nn.Linear(d, d)
        self.d = d

    def forward(self, x):
        q = self.query(x)
        k = self.query(x)  # <- wrong-projection
        v = self.value(x)
        w = torch.softmax(q @ k.transpose(-2, -1) / self.d**0.5, dim=-1)  # <- wrong-projection
        return w @ v
