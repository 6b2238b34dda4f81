# regard.check(attention)
# regard.spec(causal=False)
import torch


def attention(query, key, value):
    """query, key, value: (batch, heads, tokens, dim)"""
    n, h, t, d = query.shape
    w = torch.einsum("nhqd,nhkd->nhqk", query, key).div(d**0.5).softmax(-1)
    return torch.einsum("nhqk,nhkd->nhqd", w, key)  # <- wrong-values
