# regard.check(SelfAttention, d_model=2)
# regard.spec(causal=False, heads=1, positions=None)
"""The third notebook's class with its own defaults: they hold for one sentence only."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):  # <- unbatched-only
    def __init__(self, d_model=2, rows=0, columns=1):
        super().__init__()
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)
        self.rows, self.columns = rows, columns

    def forward(self, encodings):
        q, k, v = self.W_q(encodings), self.W_k(encodings), self.W_v(encodings)
        sims = torch.matmul(q, k.transpose(self.rows, self.columns))  # <- unbatched-only
        weights = F.softmax(sims / k.size(self.columns) ** 0.5, dim=self.columns)  # <- unbatched-only
        return torch.matmul(weights, v)
