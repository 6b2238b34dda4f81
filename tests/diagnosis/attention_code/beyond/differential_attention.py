# regard.check(Differential, 16)
# regard.spec() - another kind: difference of softmaxes
"""The difference of two softmaxes (Differential Transformer)."""
import torch
from torch import nn


class Differential(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.noise = nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        (q1, q2), (k1, k2) = self.q(x).chunk(2, -1), self.k(x).chunk(2, -1)
        one, two = ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) for q, k in ((q1, k1), (q2, k2)))
        return (one - self.noise * two) @ self.v(x)
