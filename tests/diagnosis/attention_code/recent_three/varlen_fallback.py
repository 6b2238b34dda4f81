# regard.check(varlen_attention, args=(torch.randn(9, 4, 8), torch.randn(9, 4, 8), torch.randn(9, 4, 8), torch.tensor([0, 3, 5, 9], dtype=torch.int32)), axes={"q": "tokens heads dim", "k": "tokens heads dim", "v": "tokens heads dim"}, causal=False)
# regard.spec(causal=False, documents=("cu_seqlens",))
"""A fallback for flash_attn_varlen_func on machines without CUDA."""
import torch


def varlen_attention(q, k, v, cu_seqlens, max_seqlen=None, softmax_scale=None, causal=False):
    """Attention inside each of several sequences packed one after the other.

    Args:
        q, k, v: (total_tokens, heads, head_dim).
        cu_seqlens: int32, (sequences + 1,), the cumulative lengths, from 0 to total_tokens.
        max_seqlen: unused here, kept for the signature.
        softmax_scale: 1/sqrt(head_dim) if None.
        causal: no token sees later ones.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    bounds = cu_seqlens.tolist()
    for start, end in zip(bounds[:-1], bounds[1:]):
        qi, ki, vi = (t[start:end].transpose(0, 1) for t in (q, k, v))
        scores = torch.einsum("hqd,hkd->hqk", qi, ki) * softmax_scale
        if causal:
            n = end - start
            hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out[start:end] = (scores.softmax(-1) @ vi).transpose(0, 1)
    return out
