# regard.check(attention, causal=True)
# regard.spec(causal=True)
"""scaled_dot_product_attention takes True for "may"."""
import torch
import torch.nn.functional as F


def attention(q, k, v):
    n = q.shape[-2]
    mask = torch.ones(n, n, dtype=torch.bool).triu(diagonal=1)  # <- mask-inverted
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # <- mask-inverted
