# regard.check(CausalAttention, 24, 2, causal=True)
# regard.spec(causal=True, heads=2, positions=None, padding={"lengths": "lengths"})
import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, lengths=None):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        keep = torch.ones(n, n, dtype=torch.bool).tril()
        if lengths is not None:
            keep = keep & (torch.arange(n) < lengths[0])  # <- mask-of-another-sample
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)  # <- mask-of-another-sample
        return self.o(y.transpose(1, 2).flatten(2))
