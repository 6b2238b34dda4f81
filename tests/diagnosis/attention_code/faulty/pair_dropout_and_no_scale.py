# regard.check(MultiHead, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-2, -1))  # <- no-scale
        weights = F.dropout(F.softmax(scores, dim=-1), 0.1)  # <- dropout-in-eval
        return self.out((weights @ v).transpose(1, 2).flatten(2))
