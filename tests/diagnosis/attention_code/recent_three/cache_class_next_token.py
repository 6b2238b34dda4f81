# regard.check(CausalAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""Causal attention with a small cache class (2025)."""
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn


@dataclass
class KVCache:
    k: Optional[Tensor] = None
    v: Optional[Tensor] = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k is not None:
            k, v = torch.cat([self.k, k], dim=-2), torch.cat([self.v, v], dim=-2)
        self.k, self.v = k, v
        return k, v


class CausalAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, kv_cache: Optional[KVCache] = None) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, self.n_heads, D // self.n_heads).permute(2, 0, 3, 1, 4)
        if kv_cache is not None:
            k, v = kv_cache.update(k, v)
        S = k.size(-2)
        causal = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(diagonal=S - T + 1)  # <- causal-off-by-one
        scores = (q @ k.mT) * (D // self.n_heads) ** -0.5
        weights = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, D))
