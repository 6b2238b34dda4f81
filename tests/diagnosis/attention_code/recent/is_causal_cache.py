# regard.check(CausalAttention, 24, 3, causal=True)
# regard.spec(causal=True, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x, past_kv=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if past_kv is not None:
            k = torch.cat((past_kv[0], k), dim=2)
            v = torch.cat((past_kv[1], v), dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # <- causal-top-left
        return self.o(y.transpose(1, 2).reshape(b, t, d)), (k, v)
