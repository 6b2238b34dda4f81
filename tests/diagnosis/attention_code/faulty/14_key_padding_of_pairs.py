# regard.check(Encoder, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, key_padding_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / q.size(-1) ** 0.5
        if key_padding_mask is not None:
            either = key_padding_mask[:, None, :, None] | key_padding_mask[:, None, None, :]
            s = s.masked_fill(either, float("-inf"))  # <- nan-rows
        return (torch.softmax(s, dim=-1) @ v).transpose(1, 2).flatten(2)  # <- nan-rows
