# regard.check(Attention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None)
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        width = dim // heads
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(heads, dim, width)) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(heads, width, dim))

    def forward(self, x):
        q = torch.einsum("btd,hde->bhte", x, self.W_Q)
        k = torch.einsum("btd,hde->bhte", x, self.W_K)
        v = torch.einsum("btd,hde->bhte", x, self.W_V)
        scores = torch.einsum("bhqe,bhke->bhqk", q, k)  # <- no-scale
        weights = scores.softmax(dim=-2)  # <- softmax-wrong-axis
        z = torch.einsum("bhqk,bhke->bhqe", weights, v)
        return torch.einsum("bhqe,hed->bqd", z, self.W_O)
