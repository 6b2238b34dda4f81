# regard.check(Attention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
"""Where every head is forbidden, a softmax over the heads gives each a third."""
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).reshape(b, n, self.heads, self.hd).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = torch.einsum("bhid,bhjd->bhij", q, k) / self.hd**0.5
        s = torch.where(torch.ones(n, n).triu(1).bool(), torch.full_like(s, -1e9), s)
        a = s.softmax(dim=1)  # <- softmax-wrong-axis
        y = torch.einsum("bhij,bhjd->bhid", a, v)
        return self.o(y.transpose(1, 2).reshape(b, n, d))
