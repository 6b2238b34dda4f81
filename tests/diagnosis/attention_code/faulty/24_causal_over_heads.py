# regard.check(Attention, 32, 8, causal=True)
# regard.spec(causal=True, heads=8, positions=None)
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        q = self.wq(x).reshape(b, t, self.heads, d // self.heads)
        k = self.wk(x).reshape(b, t, self.heads, d // self.heads)
        v = self.wv(x).reshape(b, t, self.heads, d // self.heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # <- heads-and-tokens-exchanged
        return self.wo(y.flatten(2))
