# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
"""Each head has an output matrix of its own, and what they give is summed."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        width = dim // heads
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(heads, dim, width)) for _ in range(3))
        self.w_o = nn.Parameter(torch.randn(heads, width, dim))

    def forward(self, x):
        x = x.unsqueeze(1)
        q, k, v = x @ self.w_q, x @ self.w_k, x @ self.w_v
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return (weights @ v @ self.w_o).sum(1)
