# regard.check(BahdanauAttention(12))
# regard.spec() - another kind: additive (Bahdanau) attention
"""Not a product at all: tanh of a sum."""
import torch
from torch import nn


class BahdanauAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w, self.u, self.score = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x):
        mixed = torch.tanh(self.w(x)[:, :, None] + self.u(x)[:, None])
        return self.score(mixed).squeeze(-1).softmax(dim=-1) @ x
