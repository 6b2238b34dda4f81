# regard.check(attention)
# regard.spec(causal=False, padding={"mask": "True keeps"})
import torch


def attention(query, key, value, mask):
    """mask: True where a query may look at a key"""
    scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
    scores.masked_fill(~mask, float("-inf"))  # <- mask-unused
    return torch.softmax(scores, dim=-1) @ value
