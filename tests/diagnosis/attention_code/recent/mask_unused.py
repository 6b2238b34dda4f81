# regard.check(TextAttention, 24, 2)
# regard.spec(causal=False, heads=2, positions=None, padding={"padding_mask": "True hides"})
import torch
import torch.nn.functional as F
from torch import nn


class TextAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x, padding_mask):
        """padding_mask: (batch, tokens), True where a token is padding"""
        b, n, c = x.shape
        q, k, v = self.in_proj(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = x.new_zeros(b, 1, 1, n).masked_fill_(padding_mask[:, None, None], float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v)  # <- mask-unused
        return self.out_proj(y.transpose(1, 2).reshape(b, n, c))
