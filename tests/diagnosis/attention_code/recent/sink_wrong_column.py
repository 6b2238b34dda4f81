# regard.check(SinkAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None, sinks=True)
import torch
from torch import nn


class SinkAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.sink = nn.Parameter(torch.randn(heads))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        s = s + torch.full((t, t), float("-inf"), device=x.device).triu_(1)
        s = torch.cat((s, self.sink.view(1, -1, 1, 1).expand(b, -1, t, 1)), dim=-1)
        w = s.softmax(-1)[..., 1:]  # <- law influence
        return self.out((w @ v).transpose(1, 2).reshape(b, t, d))
