# regard.check(Attention, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads, attn_drop=0.1):
        super().__init__()
        self.heads, self.attn_drop = heads, attn_drop
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop, is_causal=True)  # <- dropout-in-eval
        return self.proj(x.transpose(1, 2).reshape(b, n, c))
