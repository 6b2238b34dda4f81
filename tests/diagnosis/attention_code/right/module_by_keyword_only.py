# regard.check(Attention(24))
# regard.spec(causal=False, heads=1, positions=None)
from torch import nn


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, *, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
