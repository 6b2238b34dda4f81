# regard.check(CausalAttention, 24, causal=True)
# regard.spec(causal=True, heads=1, positions=None, padding={"attention_mask": "True keeps"})
"""Padding on the right is in the future anyway; on the left only the mask keeps it out."""
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, attention_mask=None):
        n = x.shape[1]
        s = torch.einsum("bid,bjd->bij", self.q(x), self.k(x)) / x.shape[-1] ** 0.5
        s = s.masked_fill(torch.ones(n, n).triu(1).bool(), -1e9)  # <- mask-unused
        return s.softmax(dim=-1) @ self.v(x)  # <- mask-unused
