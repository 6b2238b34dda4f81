# regard.check(SelfAttention(10))
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x):
        q = self.query(x)
        k = self.query(x)  # <- wrong-projection
        scores = torch.bmm(q, k.transpose(1, 2))  # <- wrong-projection, no-scale
        return torch.bmm(scores.softmax(-1), self.value(x))
