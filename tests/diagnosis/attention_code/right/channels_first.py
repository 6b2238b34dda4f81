# regard.check(ConvAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class ConvAttention(nn.Module):
    """Projections as convolutions of width 1, the tokens last."""

    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x.mT).view(b, 3, self.heads, c // self.heads, n).unbind(1)
        sims = torch.einsum("bhcq,bhck->bhqk", q, k) / (c // self.heads) ** 0.5
        mixed = torch.einsum("bhqk,bhck->bhcq", sims.softmax(-1), v)
        return self.out(mixed.reshape(b, c, n)).mT
