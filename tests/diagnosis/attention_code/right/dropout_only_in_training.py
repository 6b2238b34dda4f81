# regard.check(SelfAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, p=0.3):
        super().__init__()
        self.heads, self.p = heads, p
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        w = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        w = F.dropout(w, self.p, training=self.training)
        return F.dropout(self.o((w @ v).transpose(1, 2).flatten(2)), self.p, self.training)
