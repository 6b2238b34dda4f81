# regard.check(CosineCausalAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None, scale=regard.ANY, qk_norm="l2")
import torch
import torch.nn.functional as F
from torch import nn


class CosineCausalAttention(nn.Module):
    """Queries and keys of length 1, with a learned temperature."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 8.0))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-2)  # <- law influence
        s = q @ k.mT * self.temperature
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
