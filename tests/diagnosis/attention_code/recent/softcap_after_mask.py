# regard.check(Gemma2Attention, 32, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None, softcap=5.0)
import torch
from torch import nn


class Gemma2Attention(nn.Module):
    def __init__(self, dim, heads, cap=5.0):
        super().__init__()
        self.heads, self.cap = heads, cap
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s.masked_fill(torch.ones(t, t, device=x.device, dtype=torch.bool).triu(1), -torch.inf)
        s = self.cap * torch.tanh(s / self.cap)  # <- law influence
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
