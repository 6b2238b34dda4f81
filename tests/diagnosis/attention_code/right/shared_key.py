# regard.check(SharedKey, 16, 4)
# regard.spec(causal=False, heads=4, kv_heads=regard.ANY, positions=None)
from torch import nn


class SharedKey(nn.Module):
    """One key for all heads, and values for each."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim // heads), nn.Linear(dim, dim)

    def forward(self, x):
        q, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), self.v(x)))
        k = self.k(x)[:, None].expand(-1, self.heads, -1, -1)
        weights = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)
