# regard.check(multi_head, n_heads=4)
# regard.spec(causal=False, heads=4)
from torch.nn.functional import scaled_dot_product_attention


def multi_head(query, key, value, n_heads):
    """(batch, tokens, d_model) each"""
    q, k, v = (x.unflatten(2, (n_heads, -1)).transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v)
    return out.reshape(query.shape)  # <- heads-merged-without-transpose
