# regard.check(Attn, 12, causal=True)
# regard.spec(causal=True, heads=1, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)

    def forward(self, x):
        t = x.shape[1]
        i = torch.arange(t)
        allowed = i[:, None] > i[None, :]  # <- causal-off-by-one
        allowed[0, 0] = True
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=allowed)  # <- causal-off-by-one
