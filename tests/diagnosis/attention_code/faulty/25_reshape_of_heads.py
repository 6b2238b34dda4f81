# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, n, dim = x.shape
        width = dim // self.heads
        q, k, v = (f(x).view(b, n, self.heads, width).transpose(1, 2) for f in (self.q, self.k, self.v))
        k = k.reshape(b, self.heads, width, n)  # <- keys-not-transposed
        scores = q @ k / width**0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
