# regard.check(SelfAttention, 12)
# regard.spec(causal=False, heads=1, positions=None)
import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        w = torch.softmax(self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5, -1)
        w = F.dropout(w, p=0.2)  # <- dropout-in-eval
        return w @ self.v(x)
