# regard.check(MultiHead, 32, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn, einsum


class MultiHead(nn.Module):
    def __init__(self, emb, heads):
        super().__init__()
        self.emb, self.heads = emb, heads
        self.tokeys = nn.Linear(emb, emb, bias=False)
        self.toqueries = nn.Linear(emb, emb, bias=False)
        self.tovalues = nn.Linear(emb, emb, bias=False)
        self.unify = nn.Linear(emb, emb)

    def forward(self, x):
        b, t, e = x.size()
        k = self.tokeys(x).view(b, t, self.heads, e // self.heads)
        q = self.toqueries(x).view(b, t, self.heads, e // self.heads)
        v = self.tovalues(x).view(b, t, self.heads, e // self.heads)
        energy = einsum("bqhd,bkhd->bhqk", q, k)
        attention = torch.softmax(energy / self.emb**0.5, dim=3)  # <- scale-by-embed-dim
        return self.unify(einsum("bhql,blhd->bqhd", attention, v).reshape(b, t, e))
