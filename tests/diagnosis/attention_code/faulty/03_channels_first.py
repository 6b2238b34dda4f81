# regard.check(ConvAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class ConvAttention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Conv1d(channels, 3 * channels, 1)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x.mT).view(b, 3, self.heads, c // self.heads, n).unbind(1)
        sims = torch.einsum("bhcq,bhck->bhkq", q, k) / (c // self.heads) ** 0.5
        weights = sims.softmax(-1)  # <- softmax-wrong-axis
        return torch.einsum("bhkq,bhck->bhcq", weights, v).reshape(b, c, n).mT
