# regard.check(AlibiAttention(24, 4), causal=True)
# regard.spec(causal=True,heads=4,positions={"kind":"alibi","slopes":[2**-2,2**-4,2**-6,2**-8]})
import torch
from torch import nn


class AlibiAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** (-8 / heads * torch.arange(1, heads + 1)))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        distance = torch.arange(n) - torch.arange(n)[:, None]
        bias = self.slopes[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
