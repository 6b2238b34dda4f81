# regard.check(SelfAttention(16))
# regard.spec(causal=False, heads=1, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(1, 2) / x.shape[-1] ** 0.5
        weights = F.softmax(scores, dim=1)  # <- softmax-wrong-axis
        return weights @ v
