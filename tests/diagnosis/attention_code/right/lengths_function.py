# regard.check(masked_attention)
# regard.spec(causal=False, padding={"lengths": "lengths"})
import torch
import torch.nn.functional as F


def masked_attention(q, k, v, lengths):
    """q, k, v: (batch, tokens, dim); lengths: (batch,) of the keys, none of them 0."""
    real = torch.arange(k.size(1)) < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, :])
