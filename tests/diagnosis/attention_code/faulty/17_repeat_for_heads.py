# regard.check(MultiHeadAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"attention_mask": "True keeps"})
"""Batch and heads share an axis, batch first; the mask is repeated as if heads came first."""
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head, self.d_k = n_head, d_model // n_head
        self.w_qs = nn.Linear(d_model, d_model)
        self.w_ks = nn.Linear(d_model, d_model)
        self.w_vs = nn.Linear(d_model, d_model)
        self.fc = nn.Linear(d_model, d_model)

    def fold(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.n_head, self.d_k).transpose(1, 2).reshape(b * self.n_head, n, self.d_k)

    def forward(self, x, attention_mask):
        b, n, d = x.shape
        q, k, v = self.fold(self.w_qs(x)), self.fold(self.w_ks(x)), self.fold(self.w_vs(x))
        attn = torch.bmm(q, k.transpose(1, 2)) / self.d_k**0.5
        mask = (attention_mask == 0)[:, None, :].expand(b, n, n)
        mask = mask.repeat(self.n_head, 1, 1)  # <- mask-of-another-sample
        attn = attn.masked_fill(mask, -1e9).softmax(dim=2)  # <- mask-of-another-sample
        out = torch.bmm(attn, v).view(b, self.n_head, n, self.d_k)
        return self.fc(out.transpose(1, 2).reshape(b, n, d))
