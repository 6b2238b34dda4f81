# regard.check(Attention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
"""Over the heads, what the mask forbids is shared out among them: that is no fault of the mask."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT * q.shape[-1] ** 0.5  # <- wrong-scale
        s = torch.where(torch.ones(n, n).triu(1).bool(), torch.tensor(-1e9), s)
        a = s.softmax(dim=1)  # <- softmax-wrong-axis
        return self.o((a @ v).transpose(1, 2).reshape(b, n, d))
