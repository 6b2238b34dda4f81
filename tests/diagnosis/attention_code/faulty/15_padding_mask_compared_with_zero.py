# regard.check(Encoder, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, key_padding_mask):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        keep = (key_padding_mask == 0)[:, None, :, None]  # <- padding-on-queries
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)  # <- padding-on-queries
        return self.o(y.transpose(1, 2).flatten(2))
