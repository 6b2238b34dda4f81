# regard.check(attend)
# regard.spec(causal=False, padding={"pad_mask": "True hides"})
import torch
import torch.nn.functional as F


def attend(q, k, v, pad_mask):
    """pad_mask: (batch, keys), True where the key is padding"""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pad_mask[:, None, None, :])  # <- mask-inverted
