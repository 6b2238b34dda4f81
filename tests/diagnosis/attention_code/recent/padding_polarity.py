# regard.check(EncoderAttention, 24, 3)
# regard.spec(causal=False, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
import torch.nn.functional as F
from torch import nn


class EncoderAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, key_padding_mask=None):
        """key_padding_mask: (batch, tokens) bool, True = padding."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask[:, None, None, :]  # <- mask-inverted
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))
