# regard.check(decode, causal=True)
# regard.spec(causal=True)
"""is_causal starts at the top left: the newest query sees the oldest key only."""
import torch.nn.functional as F


def decode(query, key_cache, value_cache):
    """query: (batch, heads, new tokens, dim); the caches hold all tokens up to the newest."""
    return F.scaled_dot_product_attention(query, key_cache, value_cache, is_causal=True)  # <- causal-top-left
