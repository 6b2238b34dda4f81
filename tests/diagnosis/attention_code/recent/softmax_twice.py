# regard.check(SelfAttention, 16)
# regard.spec(causal=False, heads=1, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = F.softmax(q @ k.transpose(1, 2) / 16 ** 0.5, dim=-1)
        weights = F.softmax(scores, dim=-1)  # <- law score
        return weights @ v
