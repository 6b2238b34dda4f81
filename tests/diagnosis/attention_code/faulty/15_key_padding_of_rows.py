# regard.check(attention)
# regard.spec(causal=False, heads=1, padding={"src_key_padding_mask": "True hides"})
import torch.nn.functional as F


def attention(q, k, v, src_key_padding_mask=None):
    """src_key_padding_mask: (batch, tokens), True for padding"""
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    if src_key_padding_mask is not None:
        scores = scores.masked_fill(src_key_padding_mask.unsqueeze(2), -1e9)  # <- padding-on-queries
    return F.softmax(scores, dim=-1) @ v
