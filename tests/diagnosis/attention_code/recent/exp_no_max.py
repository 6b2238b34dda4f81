# regard.check(SimpleAttention, 24)
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class SimpleAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        w = torch.exp(q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5)  # <- law large
        return w @ v / w.sum(dim=-1, keepdim=True)
