# regard.check(CrossAttention, 24, 3, causal=False)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class CrossAttention(nn.Module):
    """Every token of x attends to the whole context."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, context):
        split = lambda z: z.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(context).chunk(2, -1)
        y = F.scaled_dot_product_attention(split(self.q(x)), split(k), split(v), is_causal=True)  # <- law influence
        return self.out(y.transpose(1, 2).flatten(2))
