# regard.check(CausalSelfAttention, 24, 3)
# regard.spec(causal=True, heads=3, positions=None)
import torch
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, L, D = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        rows = torch.arange(L, device=x.device)
        future = rows[None, :] > rows[:, None] + 1  # <- causal-off-by-one
        s = (q @ k.mT) * q.shape[-1] ** -0.5
        s = s.masked_fill(future, torch.finfo(s.dtype).min)
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, L, D))
