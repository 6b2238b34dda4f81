# regard.check(SelfAttention(3, 2, 4))
# regard.spec(causal=False, heads=1, positions=None)
"""From the fourth notebook, in other words: parameters and .T"""
import torch
import torch.nn as nn


class SelfAttention(nn.Module):
    def __init__(self, d_in, d_kq, d_v):
        super().__init__()
        self.d_kq = d_kq
        self.w_q = nn.Parameter(torch.randn(d_in, d_kq))
        self.w_k = nn.Parameter(torch.randn(d_in, d_kq))
        self.w_v = nn.Parameter(torch.randn(d_in, d_v))

    def forward(self, x):
        q, k, v = x @ self.w_q, x @ self.w_k, x @ self.w_v
        scores = q @ k.T  # <- transpose-of-batch
        weights = torch.softmax(scores / self.d_kq**0.5, dim=-1)
        return weights @ v
