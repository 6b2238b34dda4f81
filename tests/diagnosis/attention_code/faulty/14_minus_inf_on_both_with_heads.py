# regard.check(Encoder, 16, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"lengths": "lengths"})
import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, lengths):
        b, n, d = x.shape
        real = torch.arange(n) < lengths[:, None]
        mask = (real[:, :, None] & real[:, None, :])[:, None]
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        scores = scores.masked_fill(~mask, float("-inf"))  # <- nan-rows
        y = F.softmax(scores, dim=-1) @ v  # <- nan-rows
        return y.transpose(1, 2).reshape(b, n, d)
