# regard.check(Attention(14))
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        scores = torch.einsum("bqd,bkd->bqk", self.query(x), self.key(x)) / self.width**0.5
        weights = torch.softmax(scores, dim=2)
        return torch.einsum("bqk,bqd->bkd", weights, self.value(x))  # <- values-mixed-along-wrong-axis
