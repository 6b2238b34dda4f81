# regard.check(CachedAttention, 32, 4, args=(torch.randn(2, 6, 32), empty_cache(2, 4, 12, 8), torch.arange(6)), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""Attention with a static cache given as a dict, in the manner of gpt-fast."""
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F


def empty_cache(batch: int, heads: int, max_len: int, head_dim: int) -> dict:
    return {
        "k": torch.zeros(batch, heads, max_len, head_dim),
        "v": torch.zeros(batch, heads, max_len, head_dim),
    }


class CachedAttention(nn.Module):
    """Causal; input_pos holds the places of the tokens of x in the sequence."""

    def __init__(self, dim: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.head_dim = dim // n_head
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cache: dict, input_pos: Tensor):
        bsz, seqlen, dim = x.shape
        q, k, v = self.wqkv(x).split(dim, dim=-1)
        q, k, v = (t.view(bsz, seqlen, self.n_head, self.head_dim).transpose(1, 2) for t in (q, k, v))
        keys = cache["k"].index_copy(2, input_pos, k)
        values = cache["v"].index_copy(2, input_pos, v)
        slots = torch.arange(keys.size(2), device=x.device)
        mask = slots[None, :] <= input_pos[:, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, dropout_p=0.0)
        y = y.transpose(1, 2).contiguous().view(bsz, seqlen, dim)
        return self.wo(y), {"k": keys, "v": values}
