# regard.check(MultiHead, 16, 4, causal=True)
# regard.spec(causal=True, heads=4, positions=None)
import torch
import torch.nn.functional as F
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o = nn.Linear(dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attn = F.softmax(q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5, dim=-1)
        seen = torch.tril(torch.ones(n, n)).view(1, 1, n, n)
        attn = torch.where(seen == 1, attn, torch.zeros_like(attn))  # <- mask-after-softmax
        return self.o((self.drop(attn) @ v).transpose(1, 2).reshape(b, n, d))
