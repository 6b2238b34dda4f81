# regard.check(CacheAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
import torch
import torch.nn as nn


class CacheAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, past=None):
        b, t, d = x.shape
        q, k, v = (m(x).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        if past is not None:
            k = torch.cat([k, past[0]], dim=2)  # <- law cache
            v = torch.cat([v, past[1]], dim=2)
        n = k.size(2)
        s = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        s = s.masked_fill(torch.arange(n) > torch.arange(n - t, n)[:, None], float("-inf"))
        y = (s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        return self.o(y), (k, v)
