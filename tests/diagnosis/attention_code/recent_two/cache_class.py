# regard.check(CachedAttention(32, 4))
# regard.spec(causal=True, heads=4, positions={"kind": "rotary", "base": 1e4, "pairing": "halves"})
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class KVCache:
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def extend(self, keys, values):
        if self.keys is not None:
            keys = torch.cat([self.keys, keys], dim=1)
            values = torch.cat([self.values, values], dim=1)
        self.keys, self.values = keys, values
        return keys, values

    @property
    def length(self):
        return 0 if self.keys is None else self.keys.shape[1]


def rotate(x, positions, base=10_000.0):
    half = x.shape[-1] // 2
    freqs = base ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * freqs
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class CachedAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        b, t, d = x.shape
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + t, device=x.device)
        q = rotate(self.wq(x).view(b, t, self.heads, -1), positions)
        k = rotate(self.wk(x).view(b, t, self.heads, -1), positions)
        v = self.wv(x).view(b, t, self.heads, -1)
        if cache is not None:
            k, v = cache.extend(k, v)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (d // self.heads) ** 0.5
        future = torch.arange(k.shape[1], device=x.device)[None, :] > positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d))
