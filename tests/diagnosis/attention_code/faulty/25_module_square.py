# regard.check(SelfAttention, d_model=6)
# regard.spec(causal=False, heads=1, positions=None)
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
        scores = torch.matmul(q, k) / q.size(-1) ** 0.5  # <- keys-not-transposed
        return torch.matmul(scores.softmax(dim=-1), v)
