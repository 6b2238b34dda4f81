# regard.check(BiasedAttention(32, 4, 64), causal=True)
# regard.spec(causal=True, heads=4, positions=None, bias=regard.ANY)
import torch
from torch import nn


class BiasedAttention(nn.Module):
    def __init__(self, dim, heads, max_len):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.triu(torch.full((max_len, max_len), float("-inf")), 1))
        self.register_buffer("scores", torch.zeros(heads, max_len, max_len))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.scores[:, :n, :n]
        bias += (q @ k.mT).mean(0).detach() * 0.1  # <- law pure
        att = q @ k.mT / q.shape[-1] ** 0.5 + self.mask[:n, :n] + bias
        return self.proj((att.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
