# regard.check(MultiHead(24, 3))
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v = (nn.Linear(d, d // h) for _ in range(3))
        self.out = nn.Linear(d, d)

    def forward(self, x):
        outputs = []
        for _ in range(self.h):
            q = self.q(x)  # <- heads-share-projection
            k = self.k(x)  # <- heads-share-projection
            v = self.v(x)  # <- heads-share-projection
            weights = (q @ k.transpose(1, 2) / q.size(-1) ** 0.5).softmax(-1)
            outputs.append(weights @ v)
        return self.out(torch.cat(outputs, dim=-1))
