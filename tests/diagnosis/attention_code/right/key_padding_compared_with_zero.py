# regard.check(Encoder, 24, 3, means={"key_padding_mask": "True hides"})
# regard.spec(causal=False, heads=1, positions=None, padding={"key_padding_mask": "True hides"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, key_padding_mask):
        q, k, v = self.q(x), self.k(x), self.v(x)
        keep = key_padding_mask == 0
        s = torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
        s = s.masked_fill(~keep[:, None], float("-inf"))
        return self.o(s.softmax(dim=-1) @ v)
