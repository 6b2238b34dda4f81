# regard.check(MultiHeadedAttention, 4, 16, means={"mask": "True keeps"})
# regard.spec(causal=False, heads=4, positions=None, padding={"mask": "True keeps"})
"""In the way of the annotated transformer: query, key, value and mask come in, four clones of a
linear layer, the attention itself a function of its own."""
import copy
import math

import torch
from torch import nn


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


def attend(query, key, value, mask=None, dropout=None):
    width = query.size(-1)
    sims = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(width)
    if mask is not None:
        sims = sims.masked_fill(mask == 0, -1e9)
    p = sims.softmax(dim=-1)
    if dropout is not None:
        p = dropout(p)
    return torch.matmul(p, value), p


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        for linear in self.linears:
            nn.init.xavier_uniform_(linear.weight)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            linear(t).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for linear, t in zip(self.linears, (query, key, value))
        ]
        x, self.attn = attend(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](x)
