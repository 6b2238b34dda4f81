# regard.check(ring_attention)
# regard.spec(causal=False, heads=1)
"""Ring attention, simulated: each 'device' holds one block of keys and values."""
import torch


def ring_attention(q, k, v, n_devices=3):
    """q, k, v: (batch, tokens, dim).  Exact softmax attention, computed block by block."""
    m = q.new_full(q.shape[:2], float("-inf"))
    denom = q.new_zeros(q.shape[:2])
    numer = torch.zeros_like(q)
    for kb, vb in zip(k.chunk(n_devices, 1), v.chunk(n_devices, 1)):
        logits = torch.einsum("bid,bjd->bij", q, kb) / q.size(-1) ** 0.5
        new_m = torch.maximum(m, logits.max(-1).values)
        w = torch.exp(logits - new_m[..., None])
        correction = torch.exp(m - new_m)
        numer = numer * correction[..., None] + torch.einsum("bij,bjd->bid", w, vb)
        denom = denom + w.sum(-1)  # <- law mixture
        m = new_m
    return numer / denom[..., None]
