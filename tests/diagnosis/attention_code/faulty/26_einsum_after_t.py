# regard.check(Attention, 8)
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)

    def forward(self, x):
        keys = self.k(x)
        scores = self.q(x) @ torch.t(keys) / keys.size(-1) ** 0.5  # <- transpose-of-batch
        return torch.einsum("...ij,...jd->...id", scores.softmax(-1), self.v(x))
