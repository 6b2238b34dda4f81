# regard.check(Head, 24, 6, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
import torch
import torch.nn as nn
from torch.nn import functional as F


class Head(nn.Module):
    """From n_embd down to head_size: a head is narrower than what it reads."""

    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        T = x.shape[1]
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ v
