# regard.check(Attention(16, 4))
# regard.spec(causal=False, heads=4, positions=None, padding={"padding_mask": "True hides"})
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, padding_mask):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = torch.einsum("bhid,bhjd->bhij", q, k) * (d // self.heads) ** -0.5
        s = s.masked_fill(padding_mask.view(b, 1, n, 1), torch.finfo(s.dtype).min)  # <- padding-on-queries
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
