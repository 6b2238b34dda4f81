# regard.check(MultiHeadAttention, 32, 4, causal=False)
# regard.spec(causal=False, heads=4, positions=None)
"""Multi-head attention as a list of heads (2021)."""
import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_head = d_model // num_heads
        self.num_heads = num_heads
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, d_model, bias=False)
        self.wv = nn.Linear(d_model, d_model, bias=False)
        self.wo = nn.Linear(d_model, d_model)
        self.heads = []
        for i in range(num_heads):
            part = slice(i * self.d_head, (i + 1) * self.d_head)
            self.heads.append(lambda q, k, v: self.head(q[..., part], k[..., part], v[..., part]))  # <- heads-share-projection

    def head(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-2, -1)) / self.d_head**0.5
        return torch.matmul(torch.softmax(scores, dim=-1), v)

    def forward(self, x):
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        out = torch.cat([head(q, k, v) for head in self.heads], dim=-1)  # <- heads-share-projection
        return self.wo(out)
