# regard.check(CachedRopeAttention(32, 4))
# regard.spec(causal=True, heads=4, positions={"kind":"rotary","base":100.0,"pairing":"halves"})
from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn


@dataclass
class KVCache:
    keys: Optional[torch.Tensor] = None
    values: Optional[torch.Tensor] = None

    def extend(self, keys, values):
        if self.keys is not None:
            keys = torch.cat([self.keys, keys], dim=1)
            values = torch.cat([self.values, values], dim=1)
        self.keys, self.values = keys, values
        return keys, values


def rotate(x, base=100.0):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class CachedRopeAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, cache: Optional[KVCache] = None) -> torch.Tensor:
        b, t, d = x.shape
        q = rotate(self.wq(x).view(b, t, self.heads, -1))  # <- law cache
        k = rotate(self.wk(x).view(b, t, self.heads, -1))  # <- law cache
        v = self.wv(x).view(b, t, self.heads, -1)
        if cache is not None:
            k, v = cache.extend(k, v)
        s = k.shape[1]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (d // self.heads) ** 0.5
        keep = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        weights = scores.masked_fill(~keep, float("-inf")).softmax(dim=-1)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d))
