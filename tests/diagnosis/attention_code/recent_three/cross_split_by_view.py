# regard.check(EncDecAttention, 32, 4, args=(torch.randn(2, 5, 32), torch.randn(2, 7, 32)))
# regard.spec(heads=4, positions=None)
"""Cross-attention sublayer of an encoder-decoder (2020)."""
import math

import torch
import torch.nn as nn


class EncDecAttention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.d_head = d_model // n_head
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
        self.norm = nn.LayerNorm(d_model)

    def split(self, tensor):
        batch_size, length, d_model = tensor.size()
        return tensor.view(batch_size, self.n_head, length, self.d_head)  # <- heads-split-without-transpose

    def concat(self, tensor):
        batch_size, head, length, d_head = tensor.size()
        return tensor.transpose(1, 2).contiguous().view(batch_size, length, head * d_head)

    def forward(self, dec, enc):
        q, k, v = self.split(self.w_q(dec)), self.split(self.w_k(enc)), self.split(self.w_v(enc))
        score = (q @ k.transpose(2, 3)) / math.sqrt(self.d_head)
        score = torch.softmax(score, dim=-1)
        out = self.w_o(self.concat(score @ v))
        return self.norm(dec + out)
