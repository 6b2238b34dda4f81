# regard.check(CausalSelfAttention(16, 4), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""The buffer is registered and never used."""
import torch
import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size=32):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5  # <- not-causal
        att = F.softmax(att, dim=-1)  # <- not-causal
        y = (att @ v).transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y)
