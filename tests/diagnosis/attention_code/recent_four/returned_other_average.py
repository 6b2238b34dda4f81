# regard.check(AlignedAttention)
# regard.spec(heads=4, positions=None)
import torch
from torch import nn


class AlignedAttention(nn.Module):
    """Returns the output (B, T, D) and the alignment (B, T, S): the weights of each sample, averaged over its heads."""

    def __init__(self, d=16, h=4):
        super().__init__()
        self.h = h
        self.wq, self.wk, self.wv, self.wo = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def _fold(self, y):
        # (B, L, D) -> (B * h, L, D // h)
        B, L, D = y.shape
        return y.view(B, L, self.h, D // self.h).transpose(1, 2).reshape(B * self.h, L, D // self.h)

    def forward(self, query, memory):
        B, T, D = query.shape
        q, k, v = self._fold(self.wq(query)), self._fold(self.wk(memory)), self._fold(self.wv(memory))
        a = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype, device=q.device), q, k.transpose(1, 2),
                          alpha=(D // self.h) ** -0.5).softmax(-1)
        y = torch.bmm(a, v).view(B, self.h, T, -1).transpose(1, 2).reshape(B, T, D)
        alignment = a.view(self.h, B, T, -1).mean(dim=0)  # <- law mixture
        return self.wo(y), alignment
