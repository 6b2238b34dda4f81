# regard.check(ALiBiSelfAttention, 32, heads=4, causal=True)
# regard.spec(causal=True, heads=4, positions={"kind": "alibi", "slopes": [1/4, 1/16, 1/64, 1/256]})
import math
import torch
from torch import nn, einsum


class ALiBiSelfAttention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, width * 3)
        self.to_out = nn.Linear(width, width)
        slopes = torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)])
        self.register_buffer("slopes", slopes)

    def forward(self, x):
        n = x.shape[1]
        qkv = self.to_qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dots = einsum("b h i d, b h j d -> b h i j", q, k) / math.sqrt(q.shape[-1])
        dist = torch.arange(n, device=x.device)
        dist = (dist[None, :] - dist[:, None]).to(x.dtype)
        dots = dots + self.slopes[:, None, None] * dist
        dots = dots.masked_fill(dist > 0, -torch.inf)
        out = einsum("b h i j, b h j d -> b h i d", dots.softmax(-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))
