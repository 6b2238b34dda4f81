# regard.check(scaled_dot_product_attention)
# regard.spec(causal=False)
import math

import torch


def scaled_dot_product_attention(q, k, v):
    """q, k, v: (..., seq, depth)"""
    d_k = q.shape[-1]
    scores = q @ k.transpose(-2, -1) / math.sqrt(d_k)
    return torch.softmax(scores, dim=-1) @ v
