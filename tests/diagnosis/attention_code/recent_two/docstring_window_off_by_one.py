# regard.check(LocalAttention(32, 4, window_size=3), causal=True)
# regard.spec(causal=True, window=3, heads=4, positions=None)
import torch
from torch import nn


class LocalAttention(nn.Module):
    """Causal sliding window: each token sees window_size tokens, itself included."""

    def __init__(self, dim, heads, window_size):
        super().__init__()
        self.heads, self.window_size = heads, window_size
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n, device=x.device)
        dist = i[:, None] - i[None, :]
        keep = (dist >= 0) & (dist <= self.window_size)  # <- law influence
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
