# regard.check(GQA, 32, 4, 2, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class GQA(nn.Module):
    def __init__(self, dim, n_q, n_kv):
        super().__init__()
        self.n_q, self.n_kv, self.hd = n_q, n_kv, dim // n_q
        self.wq = nn.Linear(dim, n_q * self.hd)
        self.wk = nn.Linear(dim, n_kv * self.hd)
        self.wv = nn.Linear(dim, n_kv * self.hd)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q = self.wq(x).view(b, t, self.n_q, self.hd).transpose(1, 2)
        k = self.wk(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)  # <- no-scale
        return self.wo(y.transpose(1, 2).reshape(b, t, c))
