# regard.check(decode, causal=True)
# regard.spec(causal=True)
import torch
import torch.nn.functional as F


def decode(query, key_cache, value_cache):
    new, old = query.size(-2), key_cache.size(-2)
    keep = torch.ones(new, old, dtype=torch.bool).tril(old - new)
    return F.scaled_dot_product_attention(query, key_cache, value_cache, attn_mask=keep)
