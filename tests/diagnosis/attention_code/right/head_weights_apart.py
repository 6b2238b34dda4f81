# regard.check(Heads(12, 3, 4))
# regard.spec(causal=False, heads=3, positions=None)
"""One matrix for each head, as the paper writes it."""
import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, d_model, heads, d_head):
        super().__init__()
        self.W_Q = nn.Parameter(torch.randn(heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(heads, d_head, d_model) * 0.2)

    def forward(self, x):
        q = torch.einsum("bnm,hmd->bhnd", x, self.W_Q)
        k = torch.einsum("bnm,hmd->bhnd", x, self.W_K)
        v = torch.einsum("bnm,hmd->bhnd", x, self.W_V)
        a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("bhnd,hdm->bnm", a @ v, self.W_O)
