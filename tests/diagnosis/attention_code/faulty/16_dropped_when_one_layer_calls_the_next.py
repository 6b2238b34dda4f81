# regard.check(Block, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


def attend(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
    return torch.softmax(scores, dim=-1) @ v  # <- mask-unused


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v)  # <- mask-unused
        return self.out(y.transpose(1, 2).flatten(2))
