# regard.check(Relative, 16, 4)
# regard.spec(causal=False, heads=4, positions=regard.ANY)
"""Shaw: a vector for each distance meets the query beside the key."""
import torch
from torch import nn


class Relative(nn.Module):
    def __init__(self, dim, heads, most=8):
        super().__init__()
        self.heads, self.most, self.qkv = heads, most, nn.Linear(dim, 3 * dim)
        self.distances = nn.Embedding(2 * most + 1, dim // heads)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        i = torch.arange(x.shape[1])
        r = self.distances((i[:, None] - i).clamp(-self.most, self.most) + self.most)
        scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, r)
        return ((scores / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
