# regard.check(BatchAttention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"lengths": "lengths"})
import torch
from torch import nn


class BatchAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, lengths):
        """lengths: (batch,) number of real tokens of each sample"""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        padding = torch.arange(t, device=x.device) >= lengths.max()  # <- law padding
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(padding, -1e9)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
