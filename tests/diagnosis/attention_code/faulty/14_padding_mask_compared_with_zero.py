# regard.check(Encoder, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"padding_mask": "True hides"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, padding_mask=None):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = torch.einsum("bhid,bhjd->bhij", q, k) / q.size(-1) ** 0.5
        if padding_mask is not None:
            keep = padding_mask == 0
            s = s.masked_fill(~(keep[:, None, :, None] & keep[:, None, None]), float("-inf"))  # <- nan-rows
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))  # <- nan-rows
