# regard.check(Attention(32, 4, 2), args=(torch.randn(2, 6, 32), torch.arange(6)), causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None)
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F


class KVCache(nn.Module):
    def __init__(self, max_batch_size, max_seq_length, n_heads, head_dim):
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def update(self, input_pos, k_val, v_val):
        k_out, v_out = self.k_cache, self.v_cache
        k_out[:, :, input_pos] = k_val
        v_out[:, :, input_pos] = v_val
        return k_out, v_out


class Attention(nn.Module):
    def __init__(self, dim: int, n_head: int, n_local_heads: int):
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim, self.dim = n_head, n_local_heads, dim // n_head, dim
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_local_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.kv_cache = None
        self.register_buffer("causal_mask", torch.tril(torch.ones(64, 64, dtype=torch.bool)))

    def setup_cache(self, max_batch_size, max_seq_length):
        self.kv_cache = KVCache(max_batch_size, max_seq_length, self.n_local_heads, self.head_dim)

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        kv_size = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([self.dim, kv_size, kv_size], dim=-1)
        q = q.view(bsz, seqlen, self.n_head, self.head_dim).transpose(1, 2)
        k = k.view(bsz, seqlen, self.n_local_heads, self.head_dim).transpose(1, 2)
        v = v.view(bsz, seqlen, self.n_local_heads, self.head_dim).transpose(1, 2)
        mask = self.causal_mask[None, None, input_pos]
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        mask = mask[..., : k.shape[2]]
        k = k.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        v = v.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().view(bsz, seqlen, self.dim))
