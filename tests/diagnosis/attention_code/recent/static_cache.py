# regard.check(StaticCacheAttention, 32, 4, args=(torch.randn(2,6,32), torch.zeros(2,4,16,8), torch.zeros(2,4,16,8), torch.arange(6)), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class StaticCacheAttention(nn.Module):
    """gpt-fast style: preallocated keys and values, written at ``cache_position``."""

    def __init__(self, dim, n_head):
        super().__init__()
        self.n_head, self.head_dim = n_head, dim // n_head
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, k_cache, v_cache, cache_position):
        bsz, seqlen, dim = x.shape
        q, k, v = self.wqkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(bsz, seqlen, self.n_head, self.head_dim).transpose(1, 2) for t in (q, k, v))
        keys = k_cache.index_copy(2, cache_position, k)
        values = v_cache.index_copy(2, cache_position, v)
        slots = torch.arange(keys.shape[2], device=x.device)
        mask = slots[None, :] <= cache_position[:, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(bsz, seqlen, dim)), keys, values
