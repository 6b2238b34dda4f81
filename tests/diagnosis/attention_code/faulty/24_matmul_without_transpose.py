# regard.check(MultiHead, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads, self.d_head = heads, d_model // heads
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, n, d = x.shape
        q = self.q(x).view(b, n, self.heads, self.d_head)
        k = self.k(x).view(b, n, self.heads, self.d_head)
        v = self.v(x).view(b, n, self.heads, self.d_head)
        scores = q @ k.transpose(-2, -1) / self.d_head**0.5  # <- heads-and-tokens-exchanged
        weights = torch.softmax(scores, dim=-1)
        return self.o((weights @ v).reshape(b, n, d))
