# regard.check(SelfAttention(3, 2, 4))
# regard.spec(causal=False, heads=1, positions=None)
"""d_q = d_k = 2, d_v = 4, and a batch does no harm."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, d_in, d_kq, d_v):
        super().__init__()
        self.d_kq = d_kq
        self.w_q = nn.Parameter(torch.randn(d_in, d_kq))
        self.w_k = nn.Parameter(torch.randn(d_in, d_kq))
        self.w_v = nn.Parameter(torch.randn(d_in, d_v))

    def forward(self, x):
        q, k, v = x @ self.w_q, x @ self.w_k, x @ self.w_v
        return torch.softmax(q @ k.mT / self.d_kq**0.5, dim=-1) @ v
