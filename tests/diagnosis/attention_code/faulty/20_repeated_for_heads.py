# regard.check(Attention(24, 4))
# regard.spec(causal=False, heads=4, positions=None)
"""All heads are copies of one."""
from torch import nn


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.d = h, d
        self.q, self.k, self.v = (nn.Linear(d, d // h) for _ in range(3))
        self.out = nn.Linear(d, d)

    def forward(self, x):
        d, h = self.d, self.h
        q, k, v = (f(x).unsqueeze(1).repeat(1, h, 1, 1) for f in (self.q, self.k, self.v))  # <- heads-share-projection
        weights = (q @ k.mT / (d // h) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))
