# regard.check(CausalAttention, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None, padding={"attention_mask": "True keeps"})
"""Padding on the left and a causal mask: the first tokens have nobody to attend to."""
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        bias = torch.full((t, t), float("-inf")).triu(1)
        if attention_mask is not None:
            bias = bias.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf"))
        weights = torch.softmax(scores + bias, dim=-1)  # <- nan-rows
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, d))
