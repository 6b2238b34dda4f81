# regard.check(Resampler, 32, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class Resampler(nn.Module):
    """The tokens attend to themselves and to a context behind them, as in Flamingo."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, context):
        q = self.q(x)
        k, v = self.kv(torch.cat([x, context], dim=1)).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
