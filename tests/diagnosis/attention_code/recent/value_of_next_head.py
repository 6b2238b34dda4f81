# regard.check(MultiHead, 32, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        outs = []
        for h in range(self.num_heads):
            scores = q[:, h] @ k[:, h].transpose(1, 2)
            weights = torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1)
            outs.append(weights @ v[:, h - 1])  # <- law heads
        return self.out(torch.cat(outs, dim=-1))
