# regard.check(BmmAttention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
from torch import nn


class BmmAttention(nn.Module):
    """Heads folded into the batch axis."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def fold(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.heads, self.hd).transpose(1, 2).reshape(b * self.heads, n, self.hd)

    def forward(self, x, key_padding_mask):
        """key_padding_mask: (batch, tokens) bool, True = padding"""
        b, n, _ = x.shape
        q, k, v = self.fold(self.q(x)), self.fold(self.k(x)), self.fold(self.v(x))
        hide = key_padding_mask[:, None, :].repeat(self.heads, 1, 1)  # <- mask-of-another-sample
        s = torch.baddbmm(q.new_zeros(()), q, k.transpose(1, 2), beta=0, alpha=self.hd**-0.5)
        s = s.masked_fill(hide, -1e9)
        y = torch.bmm(s.softmax(-1), v).view(b, self.heads, n, self.hd)
        return self.o(y.transpose(1, 2).reshape(b, n, -1))
