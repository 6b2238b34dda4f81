# regard.check(SelfAttention, 12)
# regard.spec(causal=False, heads=1, positions=None)
"""The fourth root belongs to both: to queries and to keys."""
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, emb):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(emb, emb, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        q = q / q.size(-1) ** 0.25  # <- wrong-scale
        w = torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=2)  # <- wrong-scale
        return torch.bmm(w, v)
