# regard.check(Heads(20, 4))
# regard.spec(causal=False, heads=4, positions=None)
"""The letters of the keys are in the wrong order."""
import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhid,bhdj->bhij", q, k) * (d // self.heads) ** -0.5  # <- keys-not-transposed
        out = torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, -1), v)
        return out.transpose(1, 2).flatten(2)
