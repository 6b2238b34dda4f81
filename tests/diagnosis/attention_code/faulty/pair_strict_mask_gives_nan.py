# regard.check(CausalAttention, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
"""triu() forbids the diagonal: the first token has nothing, and its row is NaN."""
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        t, d = x.shape[-2:]
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.triu(torch.ones(t, t)).bool()  # <- causal-off-by-one
        scores = (q @ k.transpose(-2, -1) / d**0.5).masked_fill(mask, float("-inf"))  # <- causal-off-by-one
        return torch.softmax(scores, dim=-1) @ v  # <- nan-rows
