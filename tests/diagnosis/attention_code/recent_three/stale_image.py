# regard.check(CachedCrossAttention, 32, 4, causal=False)
# regard.spec(causal=False, heads=4, positions=None)
"""Cross-attention of a captioning decoder (2023)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CachedCrossAttention(nn.Module):
    """Keys and values of the image are computed once and kept while the caption grows."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self._kv = None

    def _split(self, t):
        return t.view(t.size(0), t.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x, context):
        q = self._split(self.to_q(x))
        if self._kv is None or self._kv[0].shape[0] != context.shape[0] or self._kv[0].shape[2] != context.shape[1]:  # <- law pure
            self._kv = self._split(self.to_k(context)), self._split(self.to_v(context))
        k, v = self._kv  # <- law pure
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).flatten(2))
