# regard.check(CausalSelfAttention, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.transpose(-2, -1) / self.head_dim**0.5, dim=-1)
        weights = weights * torch.tril(torch.ones(n, n))  # <- mask-after-softmax
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))
