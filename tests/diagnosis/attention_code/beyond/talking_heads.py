# regard.check(TalkingHeads(24, 4))
# regard.spec() - another kind: talking heads attention
import torch
from torch import nn


class TalkingHeads(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.before = nn.Parameter(torch.randn(heads, heads))
        self.after = nn.Parameter(torch.randn(heads, heads))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhij,hg->bgij", q @ k.mT / q.shape[-1] ** 0.5, self.before)
        w = torch.einsum("bhij,hg->bgij", s.softmax(-1), self.after)
        return self.o((w @ v).transpose(1, 2).flatten(2))
