# regard.check(MultiHead, 12, 3)
# regard.spec(causal=False, heads=3, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class MultiHead(nn.Module):
    """Chunks of columns, one below the other on the axis of the batch."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.Q, self.K, self.V = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        Q_, K_, V_ = (torch.cat(f(x).chunk(self.h, dim=2), dim=0) for f in (self.Q, self.K, self.V))
        weights = F.softmax(Q_.matmul(K_.transpose(1, 2)) / K_.size(-1) ** 0.5, dim=-1)
        return torch.cat((weights @ V_).chunk(self.h, dim=0), dim=2)
