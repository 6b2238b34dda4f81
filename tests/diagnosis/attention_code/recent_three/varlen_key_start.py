# regard.check(varlen_cross_attention, args=(torch.randn(9, 4, 8), torch.randn(12, 4, 8), torch.randn(12, 4, 8), torch.tensor([0, 3, 5, 9], dtype=torch.int32), torch.tensor([0, 4, 7, 12], dtype=torch.int32)), axes={"q": "tokens heads dim", "k": "tokens heads dim", "v": "tokens heads dim"}, causal=False)
# regard.spec(causal=False, documents=("cu_seqlens_q", "cu_seqlens_k"))
"""Variable-length cross-attention: packed queries against packed keys (2025)."""
import torch
import torch.nn.functional as F


def varlen_cross_attention(q, k, v, cu_seqlens_q, cu_seqlens_k):
    """
    q: (total_q, heads, dim); k, v: (total_k, heads, dim).
    Queries cu_seqlens_q[i]:cu_seqlens_q[i+1] read keys cu_seqlens_k[i]:cu_seqlens_k[i+1].
    """
    out = []
    for i in range(cu_seqlens_q.numel() - 1):
        lo, hi = int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])
        k_lo, k_hi = int(cu_seqlens_q[i]), int(cu_seqlens_k[i + 1])  # <- law influence
        qi = q[lo:hi].transpose(0, 1)
        ki, vi = k[k_lo:k_hi].transpose(0, 1), v[k_lo:k_hi].transpose(0, 1)
        out.append(F.scaled_dot_product_attention(qi, ki, vi).transpose(0, 1))
    return torch.cat(out, dim=0)
