# regard.check(MemoryCausalAttention, args=(torch.randn(2, 6, 16), torch.randn(2, 4, 16)))
# regard.spec(causal=True, heads=2, positions=None)
import torch
from torch import nn


class MemoryCausalAttention(nn.Module):
    """Segment-level recurrence: the tokens attend to all memories and to the tokens up to themselves.

    x: (batch, tokens, dim), mems: (batch, memories, dim).  No gradient flows into the memories.
    """

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mems):
        b, n, d = x.shape
        m = mems.shape[1]
        context = torch.cat([mems.detach(), x], dim=1)
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = (t.view(b, m + n, self.heads, -1).transpose(1, 2) for t in self.kv(context).chunk(2, dim=-1))
        s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        s = s.masked_fill(torch.ones(n, m + n, dtype=torch.bool, device=x.device).triu(m + 1), float("-inf"))
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
