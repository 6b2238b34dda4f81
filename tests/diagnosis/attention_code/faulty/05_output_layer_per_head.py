# regard.check(ManyHeads, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
from torch import nn


class Head(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, width) for _ in range(3))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)  # <- no-scale
        return scores.softmax(-1) @ self.v(x)


class ManyHeads(nn.Module):
    def __init__(self, dim, count):
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // count) for _ in range(count))
        self.outs = nn.ModuleList(nn.Linear(dim // count, dim, bias=False) for _ in range(count))

    def forward(self, x):
        return sum(out(head(x)) for head, out in zip(self.heads, self.outs))
