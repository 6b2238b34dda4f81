# regard.check(Attention(24))
# regard.spec(causal=False, heads=1, positions=None)
"""Half precision for the projection alone."""
from torch import nn


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Linear(d, 3 * d).half()

    def forward(self, x):
        q, k, v = self.w(x.half()).chunk(3, -1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).float().softmax(-1)
        return (weights @ v.float()).to(x.dtype)
