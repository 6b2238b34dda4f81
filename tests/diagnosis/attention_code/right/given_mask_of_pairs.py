# regard.check(attend, means={"attn_mask": "True keeps"})
# regard.spec(causal=False, padding={"attn_mask": "True keeps"})
import torch
import torch.nn.functional as F


def attend(query, key, value, attn_mask=None):
    """attn_mask: bool, True = may attend, broadcast to (batch, queries, keys)"""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
