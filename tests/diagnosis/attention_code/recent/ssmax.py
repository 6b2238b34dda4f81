# regard.check(ScalableSoftmaxAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None, scale=regard.ANY)
import torch
from torch import nn


class ScalableSoftmaxAttention(nn.Module):
    """Scores are multiplied with a learned s times log of the number of keys."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.s = nn.Parameter(torch.full((heads, 1, 1), 0.43))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        count = torch.arange(2, n + 2, device=x.device)[:, None]
        a = q @ k.mT * q.shape[-1] ** -0.5 * self.s * count.log()
        a = a.masked_fill(torch.ones(n, n, device=x.device, dtype=torch.bool).triu(1), -torch.inf)
        return self.out((a.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
