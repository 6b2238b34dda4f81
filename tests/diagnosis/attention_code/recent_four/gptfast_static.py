# regard.check(causal_step, args=(torch.randn(2, 6, 16), torch.arange(6), torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 8), torch.randn(16, 48), torch.randn(16, 16)), causal=True)
# regard.spec(causal=True, heads=2, positions=None)
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F


def causal_step(x: Tensor, input_pos: Tensor, k_cache: Tensor, v_cache: Tensor, wqkv: Tensor, wo: Tensor, n_head: int = 2) -> Tensor:
    """One step with a static cache: x (B, S, D), input_pos (S,), caches (B, n_head, max_len, D / n_head)."""
    bsz, seqlen, dim = x.shape
    q, k, v = (x @ wqkv).view(bsz, seqlen, 3, n_head, dim // n_head).permute(2, 0, 3, 1, 4)
    k_cache[:, :, input_pos] = k
    v_cache[:, :, input_pos] = v
    slots = torch.arange(k_cache.size(2), device=x.device)
    mask = slots[None, :] <= input_pos[:, None]
    y = F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=mask)
    return y.transpose(1, 2).reshape(bsz, seqlen, dim) @ wo
