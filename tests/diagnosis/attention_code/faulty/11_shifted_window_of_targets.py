# regard.check(attention, causal=True)
# regard.spec(causal=True)
"""Somebody shifted the mask by one as well as the targets."""
import torch
import torch.nn.functional as F


def attention(query, key, value):
    t = query.size(-2)
    allowed = torch.tril(torch.ones(t, t, dtype=torch.bool), diagonal=1)  # <- causal-off-by-one
    return F.scaled_dot_product_attention(query, key, value, allowed)  # <- causal-off-by-one
