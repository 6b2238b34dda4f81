# regard.check(gqa_attention, args=(torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)), axes={"q": "batch tokens heads dim", "k": "batch tokens heads dim", "v": "batch tokens heads dim"}, causal=True)
# regard.spec(causal=True, kv_heads=2)
"""Grouped-query attention without repeating the keys."""
import torch


def gqa_attention(q, k, v, causal=True):
    """
    q: (batch, tokens, n_heads, head_dim)
    k, v: (batch, tokens, n_kv_heads, head_dim); n_heads is a multiple of n_kv_heads
    """
    b, t, h, d = q.shape
    s, g = k.shape[1], k.shape[2]
    q = q.reshape(b, t, g, h // g, d)
    logits = torch.einsum("btgrd,bsgd->bgrts", q, k) * d**-0.5
    if causal:
        keep = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
        logits = torch.where(keep, logits, torch.finfo(logits.dtype).min)
    probs = logits.softmax(dim=-1)
    out = torch.einsum("bgrts,bsgd->btgrd", probs, v)
    return out.reshape(b, t, h, d)
