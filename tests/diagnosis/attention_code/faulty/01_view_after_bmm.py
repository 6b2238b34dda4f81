# regard.check(MultiHeadAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, n, d = x.size()
        q = self.w_q(x).view(b, n, self.h, self.d_k).transpose(1, 2)
        k = self.w_k(x).view(b, n, self.h, self.d_k).transpose(1, 2)
        v = self.w_v(x).view(b, n, self.h, self.d_k).transpose(1, 2)
        attn = torch.softmax(q @ k.transpose(-2, -1) / self.d_k**0.5, dim=-1)
        z = attn @ v
        z = z.view(b, n, d)  # <- heads-merged-without-transpose
        return self.w_o(z)
