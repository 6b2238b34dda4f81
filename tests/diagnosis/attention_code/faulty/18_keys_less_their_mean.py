# regard.check(SelfAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
"""The mean is taken over the batch, where that of the tokens was meant."""
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        k = k - k.mean(0, keepdim=True)  # <- attends-across-batch
        weights = (q @ k.mT / (d // self.heads) ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(b, t, d)
