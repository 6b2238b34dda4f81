# regard.check(attention)
# regard.spec(causal=False)
"""Columns are queries all the way: k q^T, a softmax over the rows, and a transpose at the end."""
import torch


def attention(q, k, v):
    scores = k @ q.transpose(-2, -1) / q.size(-1) ** 0.5  # (keys, queries)
    weights = torch.softmax(scores, dim=-2)
    return weights.transpose(-2, -1) @ v
