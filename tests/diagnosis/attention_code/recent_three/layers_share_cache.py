# regard.check(Decoder, 32, 4, 2, args=(torch.randn(2, 6, 32), {}), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""A two-layer decoder with a list of caches (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalAttention(nn.Module):
    def __init__(self, dim, heads, layer_idx=0):
        super().__init__()
        self.heads = heads
        self.layer_idx = layer_idx
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if self.layer_idx in cache:
                k = torch.cat([cache[self.layer_idx][0], k], dim=2)  # <- law cache
                v = torch.cat([cache[self.layer_idx][1], v], dim=2)
            cache[self.layer_idx] = (k, v)
        s = k.size(2)
        mask = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    """(batch, tokens, dim) -> (batch, tokens, dim); cache: a dict, empty at the start of a text."""

    def __init__(self, dim=32, heads=4, n_layers=2):
        super().__init__()
        self.layers = nn.ModuleList([CausalAttention(dim, heads) for _ in range(n_layers)])  # <- law cache
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(n_layers)])

    def forward(self, x, cache=None):
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), cache)
        return x
