# regard.check(IncrementalAttention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""Incremental attention (2023)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class IncrementalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, past=[]):  # <- law pure
        """Causal. past: list of the (key, value) pairs of earlier chunks; it is extended."""
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        past.append((k, v))  # <- law pure
        keys = torch.cat([p[0] for p in past], dim=2)
        values = torch.cat([p[1] for p in past], dim=2)
        s = keys.size(2)
        mask = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))
