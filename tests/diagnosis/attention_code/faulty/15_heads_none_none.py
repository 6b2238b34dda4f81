# regard.check(MultiHeadAttention, 24, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"attention_mask": "True keeps"})
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * (d // self.h) ** -0.5
        if attention_mask is not None:
            keep = attention_mask.bool()[:, None, :, None]  # <- padding-on-queries
            sim = sim.masked_fill(~keep, torch.finfo(sim.dtype).min)  # <- padding-on-queries
        return self.out((sim.softmax(-1) @ v).transpose(1, 2).flatten(2))
