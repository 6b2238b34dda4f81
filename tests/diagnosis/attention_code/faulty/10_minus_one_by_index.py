# regard.check(Attention, 16, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores[:, later] = -1  # <- mask-fill-value
        return scores.softmax(2) @ v
