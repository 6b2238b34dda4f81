# regard.check(RollingCausalAttention, 24, 3, causal=True)
# regard.spec(causal=True, window=4, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class RollingCausalAttention(nn.Module):
    """Window of 4 tokens; the cache keeps the newest 4 keys and values."""

    def __init__(self, dim, heads, window=4):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        s = k.shape[2]
        gap = torch.arange(s - t, s)[:, None] - torch.arange(s)[None, :]
        mask = (gap >= 0) & (gap < self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(x.device))
        new = (k[:, :, : self.window], v[:, :, : self.window])  # <- law cache
        return self.proj(y.transpose(1, 2).reshape(b, t, d)), new
