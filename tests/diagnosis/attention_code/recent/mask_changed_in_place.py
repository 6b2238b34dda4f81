# regard.check(attention, means={"attn_mask": "added to the scores"})
# regard.spec(causal=False, padding={"attn_mask": "added to the scores"})
import torch


def attention(query, key, value, attn_mask):
    """attn_mask: numbers, added to the scores"""
    scale = query.size(-1) ** -0.5
    scores = query @ key.transpose(-2, -1)
    scores = scores.mul_(scale)
    scores = scores + attn_mask
    attn_mask.mul_(scale)  # <- law padding
    return scores.softmax(dim=-1) @ value
