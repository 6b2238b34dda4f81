# regard.check(attn)
# regard.spec(causal=False)
import torch
import torch.nn.functional as F


def attn(q, k, v):
    """q, k, v: (batch, heads, tokens, head_dim)"""
    b, h, t, d = q.shape
    q = q * d**-0.5  # <- wrong-scale
    return F.scaled_dot_product_attention(q, k, v)
