# regard.check(Attention, 16)
# regard.spec(causal=False, heads=1, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, attention_mask):
        """attention_mask: (batch, tokens), 1 for tokens and 0 for padding"""
        scores = self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5
        scores = scores.masked_fill(attention_mask.bool()[:, None, :], -1e9)  # <- mask-inverted
        return scores.softmax(-1) @ self.v(x)
