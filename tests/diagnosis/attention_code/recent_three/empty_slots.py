# regard.check(PreallocatedAttention, 32, 4, args=(torch.randn(2, 6, 32), (torch.zeros(2, 4, 12, 8), torch.zeros(2, 4, 12, 8)), torch.arange(6)), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""Decoding with a preallocated cache as a tuple (2024)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class PreallocatedAttention(nn.Module):
    """Causal. x holds the tokens at the places cache_position of the text; the cache has max_len slots."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, kv_cache, cache_position):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        keys, values = kv_cache
        keys = keys.index_copy(2, cache_position, k)
        values = values.index_copy(2, cache_position, v)
        if t > 1:
            slots = torch.arange(keys.size(2), device=x.device)
            mask = slots[None, :] <= cache_position[:, None]
        else:
            mask = None  # <- law cache
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)  # <- law cache
        return self.out(y.transpose(1, 2).reshape(b, t, d)), (keys, values)
