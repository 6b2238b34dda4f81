# regard.check(Attention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.d = heads, hidden // heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x):
        b, n, h = x.shape

        def fold(y):
            return y.view(b, n, self.heads, self.d).transpose(1, 2).reshape(-1, n, self.d)

        q, k, v = fold(self.q(x)), fold(self.k(x)), fold(self.v(x))
        zero = torch.zeros(b * self.heads, n, n)
        scores = torch.baddbmm(zero, q, k.transpose(1, 2))  # <- no-scale
        y = torch.bmm(scores.softmax(dim=-1), v)
        return self.o(y.view(b, self.heads, n, self.d).transpose(1, 2).reshape(b, n, h))
