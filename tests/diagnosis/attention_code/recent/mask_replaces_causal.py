# regard.check(CausalAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None, padding={"key_padding_mask": "True hides"})
import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, key_padding_mask=None):
        """key_padding_mask: (batch, tokens) bool, True = padding"""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if key_padding_mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=~key_padding_mask[:, None, None])  # <- law padding
        return self.out(y.transpose(1, 2).reshape(b, t, d))
