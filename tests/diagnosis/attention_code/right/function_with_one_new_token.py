# regard.check(attention, causal=True)
# regard.spec(causal=True)
import torch
import torch.nn.functional as F


def attention(q, k, v, kv_cache=None):
    """Causal only without a cache: with one there is one new token at a time."""
    if kv_cache is not None:
        k, v = torch.cat([kv_cache[0], k], dim=-2), torch.cat([kv_cache[1], v], dim=-2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=kv_cache is None)
