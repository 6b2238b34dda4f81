# regard.check(CausalAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT * q.shape[-1] ** -0.5
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        s[:, 0] = s[:, 0].masked_fill(hidden, -torch.inf)  # <- not-causal
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
