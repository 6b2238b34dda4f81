# regard.check(Attn(40, 5), causal=True)
# regard.spec(causal=True, heads=5, positions=None)
import torch
from torch import nn


class Attn(nn.Module):
    def __init__(self, dim, n):
        super().__init__()
        self.n = n
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        s = lambda y: y.reshape(b, t, self.n, d // self.n).permute(0, 2, 1, 3)
        q, k, v = s(self.wq(x)), s(self.wk(x)), s(self.wv(x))
        a = (q @ k.mT / (d // self.n) ** 0.5 + torch.full((t, t), -torch.inf).triu(1)).softmax(-1)
        return self.wo((a @ v).contiguous().view(b, -1, d))  # <- heads-merged-without-transpose
