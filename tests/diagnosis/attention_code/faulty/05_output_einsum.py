# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.Wo = nn.Parameter(torch.randn(heads, dim // heads, dim))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        scores = q @ k.transpose(-2, -1)  # <- no-scale
        z = scores.softmax(dim=-1) @ v
        return torch.einsum("bhqe,hed->bqd", z, self.Wo)
