# regard.check(Attn, 24, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class Attn(nn.Module):
    def __init__(self, c, h, attn_drop=0.2):
        super().__init__()
        self.h, self.attn_drop = h, attn_drop
        self.qkv = nn.Linear(c, 3 * c)
        self.proj = nn.Linear(c, c)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop)  # <- dropout-in-eval
        return self.proj(y.transpose(1, 2).flatten(2))
