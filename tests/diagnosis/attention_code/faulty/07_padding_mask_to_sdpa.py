# regard.check(Attention, 16, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"padding_mask": "True hides"})
"""padding_mask is True for padding; scaled_dot_product_attention takes True for "may"."""
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, padding_mask):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=padding_mask[:, None, None])  # <- mask-inverted
        return self.o(y.transpose(1, 2).flatten(2))
