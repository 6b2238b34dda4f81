# regard.check(SinkAttention(32, 4))
# regard.spec(causal=True, heads=4, positions=None, sinks=True)
import torch
from torch import nn


class SinkAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        logits = logits.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)
        combined = torch.cat([logits, sinks], dim=-1)
        weights = combined[..., :-1].softmax(dim=-1)  # <- law gradient
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
